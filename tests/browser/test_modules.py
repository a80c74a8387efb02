"""The page's modules by themselves, in the browser that runs them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from playwright.async_api import Browser

from tests.support.browsing import Visit, visit
from tests.support.serving import serving

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def page(browser: Browser) -> AsyncIterator[Visit]:
    async with serving() as server, visit(browser, server.port) as visited:
        yield visited


async def run(page: Visit, module: str, code: str, argument: Any = None) -> Any:
    """`code` sees the module as `m` and the argument as `x`."""
    body = f"async (x) => {{ const m = await import('/static/{module}.js'); {code} }}"
    return await page.page.evaluate(body, argument)


ENDINGS = """
    const base = {attempt: 0, random: () => 0.5, isOnline: true};
    return m.endingOf({...base, ...x});
"""


@pytest.mark.parametrize(
    ("given", "kind", "retry_ms"),
    [
        (
            {"closed": {"code": 1013}, "error": {"code": "at_capacity", "retry_after_ms": 4321}},
            "refused",
            4321,
        ),
        ({"closed": {"code": 1013}, "error": {"code": "starting", "retry_after_ms": 700}}, "refused", 700),
        ({"closed": {"code": 1001}, "error": {"code": "draining"}}, "refused", 500),
        ({"closed": {"code": 1011}, "error": {"code": "engine_failed"}}, "lost", 500),
        ({"closed": {"code": 1011}, "error": {"code": "session_failed"}}, "lost", 500),
        ({"closed": {"code": 1006}, "error": None}, "lost", 500),
        ({"closed": {"code": 1006}, "error": None, "isOnline": False}, "lost", 500),
        ({"closed": {"code": 1006}, "error": None, "attempt": 3}, "lost", 4000),
        ({"closed": {"code": 1006}, "error": None, "attempt": 9}, "lost", 15_000),
        ({"closed": {"code": 1006}, "error": None, "attempt": 10}, "lost", None),
        ({"closed": {"code": 1008}, "error": {"code": "unauthorized", "message": "x"}}, "key", None),
        ({"closed": {"code": 1000}, "error": {"code": "session_over", "message": "x"}}, "over", None),
        ({"closed": {"code": 1003}, "error": {"code": "not_understood", "message": "x"}}, "over", None),
        ({"closed": {"code": 1000, "reason": "bye"}, "error": None}, "over", None),
    ],
)
async def test_what_an_end_means(page: Visit, given: dict[str, Any], kind: str, retry_ms: int | None):
    ending = await run(page, "endings", ENDINGS, given)
    assert (ending["kind"], ending["retryMs"]) == (kind, retry_ms)
    assert ending["title"] and "text" in ending


async def test_waiting_is_jittered_and_capped(page: Visit):
    waits = await run(page, "endings", "return x.map((n) => m.backoffMs(n));", [0] * 50 + [30] * 50)
    assert all(250 <= wait <= 750 for wait in waits[:50]) and len(set(waits[:50])) > 40
    assert all(7_500 <= wait <= 22_500 for wait in waits[50:])


TRANSCRIPT = """
    const t = new m.Transcript({onChange() {}, onRemove() {}});
    for (const [name, ...rest] of x) t[name](...rest);
    return t.entries;
"""


def event(kind: str, **fields: Any) -> list[Any]:
    return ["apply", {"type": kind, **fields}]


def answer(number: str, *pieces: tuple[str, int]) -> list[list[Any]]:
    """An answer whose pieces are texts and the milliseconds they are spoken in."""
    text = "".join(piece for piece, _ in pieces)
    return [
        event("session.created", voice=True),
        event("response.created", response_id=number),
        event("response.text.delta", response_id=number, delta=text),
        *(event("response.audio", response_id=number, text=piece, duration_ms=ms) for piece, ms in pieces),
    ]


@pytest.mark.parametrize(
    ("played_ms", "heard"),
    [
        (0, ""),
        (400, "One two "),  # inside "three": only whole words count
        (900, "One two three "),
        (1000, "One two three four. "),
        (1500, "One two three four. Five "),
        (5000, "One two three four. Five six."),
    ],
)
async def test_an_interrupted_answer_ends_where_it_was_heard(page: Visit, played_ms: int, heard: str):
    steps = [
        *answer("r", ("One two three four.", 1000), (" Five six.", 1000)),
        event("response.flush", response_id="r"),
        ["played", "r", played_ms, True],
        event("response.done", response_id="r", reason="interrupted"),
    ]
    (entry,) = await run(page, "transcript", TRANSCRIPT, steps)
    assert entry["state"] == "cut"
    assert entry["text"][: entry["heardChars"]].strip() == heard.strip()


async def test_the_server_has_the_last_word_on_what_was_heard(page: Visit):
    steps = [
        *answer("r", ("One two three four.", 1000)),
        event("response.flush", response_id="r"),
        ["played", "r", 900, True],
        event("response.heard", response_id="r", text="One  two", played_ms=480),
    ]
    (entry,) = await run(page, "transcript", TRANSCRIPT, steps)
    assert entry["text"][: entry["heardChars"]] == "One two"


async def test_an_answer_that_was_played_to_its_end_is_heard_whole(page: Visit):
    steps = [*answer("r", ("One 2", 700)), event("response.done", response_id="r", reason="stop")]
    steps[3][1]["text"] = "One two"  # spoken otherwise than written
    (entry,) = await run(page, "transcript", TRANSCRIPT, [*steps, ["played", "r", 700, True]])
    assert (entry["state"], entry["heardChars"]) == ("done", len("One 2"))


async def test_an_answer_without_sound_counts_as_read(page: Visit):
    silent = answer("r", ("One two.", 500))[:3]
    assert (await run(page, "transcript", TRANSCRIPT, silent))[0]["heardChars"] == 0
    failed = [*silent, event("warning", code="voice_failed")]
    assert (await run(page, "transcript", TRANSCRIPT, failed))[0]["heardChars"] is None
    midway = [
        *answer("r", ("One two.", 500)),
        event("warning", code="voice_failed"),
        ["played", "r", 100, False],
    ]
    assert (await run(page, "transcript", TRANSCRIPT, midway))[0]["heardChars"] is None
    off = [event("session.created", voice=False), *silent[1:]]
    assert (await run(page, "transcript", TRANSCRIPT, off))[0]["heardChars"] is None


async def test_a_noise_leaves_no_entry_and_speech_without_words_leaves_its_length(page: Visit):
    started, stopped = event("speech.started", audio_ms=1000), event("speech.stopped", audio_ms=4000)
    assert (
        await run(page, "transcript", TRANSCRIPT, [started, stopped, event("input.transcript", text="")])
        == []
    )
    entries = await run(page, "transcript", TRANSCRIPT, [started, stopped, *answer("r", ("Yes.", 300))])
    assert [entry["text"] for entry in entries] == ["(spoken, 3 s)", "Yes."]


async def test_a_day_long_session_leaves_a_bounded_page(page: Visit):
    """Entries, their text and the plot's points: all of bounded number."""
    counts = await run(
        page,
        "transcript",
        """
        const removed = [];
        const t = new m.Transcript({onChange() {}, onRemove: (entry) => removed.push(entry.id)});
        for (let i = 0; i < 5000; i++) {
          t.apply({type: "input.transcript", text: "word ".repeat(100)});
          t.apply({type: "response.created", response_id: `r${i}`});
          t.apply({type: "response.text.delta", response_id: `r${i}`, delta: "x".repeat(100)});
        }
        for (let i = 0; i < 5000; i++) t.apply({type: "input.transcript", text: "and on and on"});
        for (let i = 0; i < 5000; i++) {
          t.apply({type: "response.text.delta", response_id: "r4999", delta: "x".repeat(100)});
        }
        const {Recent, MAX_POINTS, SPAN_S} = await import("/static/lateness.js");
        const recent = new Recent();
        for (let i = 0; i < 100_000; i++) recent.push(i * 0.01, 100);
        const full = recent.points.length;
        recent.forget(1000 + SPAN_S - 1);
        return {entries: t.entries.length, max: m.MAX_ENTRIES, removed: removed.length,
                chars: Math.max(...t.entries.map((entry) => entry.text.length)),
                full, maxPoints: MAX_POINTS, left: recent.points.length};
        """,
    )
    assert counts["entries"] == counts["max"] and counts["removed"] >= 9_800
    assert counts["chars"] <= 20_000
    assert counts["full"] == counts["maxPoints"] and 90 <= counts["left"] <= 101


FLOOR = "const f = new m.Floor(); f.reset('listening'); return x.map((event) => f.apply(event));"


async def test_who_has_the_floor(page: Visit):
    created, done = (
        {"type": "response.created", "response_id": "r"},
        {"type": "response.done", "response_id": "r"},
    )
    delta = {"type": "response.text.delta", "response_id": "r", "delta": "x"}
    started, stopped = {"type": "speech.started"}, {"type": "speech.stopped"}
    sounds, falls_silent = {"type": "sound", "isPlaying": True}, {"type": "sound", "isPlaying": False}
    spoken = [started, stopped, created, delta, sounds, done, falls_silent]
    assert await run(page, "floor", FLOOR, spoken) == [
        "you", "thinking", "thinking", "answering", "answering", "answering", "listening",
    ]  # fmt: skip
    interrupted = [created, delta, sounds, started, done, falls_silent, stopped, created]
    assert (await run(page, "floor", FLOOR, interrupted))[3:] == ["you", "you", "you", "thinking", "thinking"]
    slow_voice = [{"type": "session.created", "voice": True}, created, delta, done, sounds]
    all_sound = [{"type": "response.audio.done", "response_id": "r"}, falls_silent]
    assert (await run(page, "floor", FLOOR, slow_voice + all_sound))[2:] == [*["answering"] * 4, "listening"]
    assert (await run(page, "floor", FLOOR, slow_voice[1:4]))[-1] == "listening"  # no voice: done is done
    noise = [started, stopped, {"type": "input.transcript", "text": " "}]
    assert (await run(page, "floor", FLOOR, noise))[-1] == "listening"


async def test_words_behind_the_sound_s_end_wait_for_no_sound(page: Visit):
    """The voice failed, or was told to stop: the text goes on."""

    def answered(number: str, *in_between: dict[str, Any]) -> list[dict[str, Any]]:
        delta = {"type": "response.text.delta", "response_id": number, "delta": "x"}
        done = {"type": "response.done", "response_id": number}
        return [{"type": "response.created", "response_id": number}, delta, *in_between, delta, done]

    aloud = {"type": "session.created", "voice": True}
    failed = {"type": "warning", "code": "voice_failed"}
    for end in ("response.audio.done", "response.flush"):
        mute = [aloud, *answered("r", failed, {"type": end, "response_id": "r"})]
        assert (await run(page, "floor", FLOOR, mute))[-2:] == ["answering", "listening"]
        assert (await run(page, "floor", FLOOR, mute + answered("s")))[-1] == "answering"  # its sound is due


CONVERSATION = """
    const sent = [];
    const c = new m.Conversation({url: "ws://x", getKey() {}, getSettings: () => ({})});
    c.connection.send = ({type}) => sent.push(type);
    c.connection.sendAudio = () => sent.push("audio");
    c.turn = "manual";
    const frame = () => c.onFrame(new ArrayBuffer(640), 0);
    const late = () => new Promise((resolve) => setTimeout(resolve, 300));
"""


async def test_push_to_talk_pressed_again_at_once_is_heard(page: Visit):
    code = """
        c.press(); frame(); c.release(); frame(); // the last frames come late
        c.press(); await late(); frame(); c.release(); await late(); frame();
        return sent.filter((type) => type !== "response.cancel");
    """
    turns = ["audio", "audio", "input.commit", "audio", "input.commit"]
    assert await run(page, "conversation", CONVERSATION + code) == turns


async def test_push_to_talk_is_up_after_a_session_was_lost(page: Visit):
    code = """
        c.press(); frame(); c.release(); c.onState({name: "waiting"}); await late(); frame();
        const {TalkButton} = await import("/static/talk_button.js");
        const button = document.createElement("button"), told = [];
        const onPress = () => told.push("press"), onRelease = () => told.push("release");
        const talk = new TalkButton(button, {onPress, onRelease});
        talk.hold(true); talk.reset();
        const shown = [button.textContent, button.getAttribute("aria-pressed")];
        talk.hold(false); talk.hold(true); // the finger leaves, and comes back
        return [sent, shown, told];
    """
    sent, shown, told = await run(page, "conversation", CONVERSATION + code)
    assert sent == ["audio"]  # the commit of a session that is gone ends no turn of the next
    assert shown == ["Hold to talk", "false"] and told == ["press", "press"]


async def test_a_refused_setting_costs_no_other(page: Visit):
    code = """
        const updates = [];
        c.connection.send = (message) => updates.push(message);
        c.getSettings = () => ({instructions: "Be brief.", turn: "continuous", voice: false});
        c.session = {turn: "server_vad", voice: true, voice_sample_rate: 24000};
        c.update();
        c.session = {...c.session, instructions: "Be brief.", turn: "continuous", voice: false};
        c.update(); // all is as it should be
        return updates;
    """
    fields = [{"instructions": "Be brief."}, {"turn": "continuous"}, {"voice": False}]
    assert await run(page, "conversation", CONVERSATION + code) == [
        {"type": "session.update", **field} for field in fields
    ]


async def test_a_microphone_that_is_granted_too_late_is_let_go(page: Visit):
    """A worklet could not be loaded while the browser still asked."""
    code = """
        const {getUserMedia} = navigator.mediaDevices, {addModule} = AudioWorklet.prototype;
        let grant, problem = null;
        const stopped = [];
        navigator.mediaDevices.getUserMedia = () => new Promise((resolve) => { grant = resolve; });
        AudioWorklet.prototype.addModule = async () => { throw new DOMException("no", "AbortError"); };
        try {
          c.calls.onProblem = (error) => { problem = error.name; };
          await c.start();
          grant({getTracks: () => [{stop: () => stopped.push(problem)}]});
          await late();
          return stopped;
        } finally {
          navigator.mediaDevices.getUserMedia = getUserMedia;
          AudioWorklet.prototype.addModule = addModule;
        }
    """
    assert await run(page, "conversation", CONVERSATION + code) == ["AbortError"]


PLAYER = """
    const [rate, frequency, sizes, flushAtS] = x;
    const seconds = sizes.reduce((a, b) => a + b) / 24000;
    const context = new OfflineAudioContext(1, Math.ceil((seconds + 0.3) * rate), rate);
    await context.audioWorklet.addModule("/static/worklets/player.js");
    const node = new AudioWorkletNode(context, "player", {
      numberOfInputs: 0, outputChannelCount: [1], processorOptions: {sourceRate: 24000}});
    node.connect(context.destination);
    const told = [];
    let onFlushed;
    node.port.onmessage = ({data}) => { told.push(data); if (data.type === "flushed") onFlushed(); };
    const flush = (id) => new Promise((resolve) => {
      onFlushed = resolve;
      node.port.postMessage({type: "flush", id});
    });
    let n = 0;
    for (const size of sizes) {
      const turn = 2 * Math.PI * frequency / 24000;
      const samples = Int16Array.from({length: size}, () => 16384 * Math.sin(turn * n++));
      node.port.postMessage({type: "push", id: "r", samples});
    }
    if (flushAtS === null) node.port.postMessage({type: "end", id: "r"});
    else context.suspend(flushAtS).then(() => flush("r")).then(() => context.resume());
    await flush("of another response"); // by now the player has what came before
    const rendered = await context.startRendering();
    await new Promise((resolve) => setTimeout(resolve, 100)); // its last reports are on their way
    return [Array.from(rendered.getChannelData(0)), told];
"""


@pytest.mark.parametrize("rate", [16_000, 44_100, 48_000, 96_000])
async def test_pieces_are_played_without_a_seam_at_any_rate(page: Visit, rate: int):
    sizes, frequency = [1000, 24_000, 1, 7777, 12_000], 440
    rendered, told = await run(page, "app", PLAYER, [rate, frequency, sizes, None])
    seconds = sum(sizes) / 24_000
    signal = np.array(rendered[round(0.01 * rate) : round((seconds - 0.01) * rate)])
    t = 2 * np.pi * frequency * np.arange(len(signal)) / rate
    waves = np.stack([np.sin(t), np.cos(t)], axis=1)
    fit, *_ = np.linalg.lstsq(waves, signal, rcond=None)
    residual = signal - waves @ fit
    assert abs(np.hypot(*fit) - 0.5) < 0.005
    assert np.abs(residual).max() < 0.005  # a seam would click
    assert not np.any(rendered[round((seconds + 0.05) * rate) :])
    ends = [message for message in told if message.get("hasEnded")]
    assert [message["numPlayed"] for message in ends] == [sum(sizes)]  # to the sample


async def test_a_flush_is_heard_at_once_and_counted_to_the_sample(page: Visit):
    rate, flush_s = 48_000, 0.512  # a whole number of quanta
    rendered, told = await run(page, "app", PLAYER, [rate, 440, [24_000, 24_000], flush_s])
    (flushed,) = [message for message in told if message["type"] == "flushed" and message["id"] == "r"]
    assert abs(flushed["numPlayed"] - flush_s * 24_000) <= 2
    assert np.any(rendered[: round(flush_s * rate)])
    assert not np.any(rendered[round((flush_s + 0.005) * rate) :])
    steps = np.abs(np.diff(rendered))
    assert steps.max() < 0.04  # faded, not cut: a cut of this tone would be a step of up to 0.5


async def test_audio_is_dropped_and_counted_where_the_socket_is_slow(page: Visit):
    code = """
        const c = new m.Connection({url: "ws://x", getKey() {}, onState() {}, onEvent() {}, onSound() {}});
        c.query = {sample_rate: 16000};
        c.state = {name: "live"};
        const sent = [];
        c.socket = {readyState: WebSocket.OPEN, bufferedAmount: 0, send: (data) => sent.push(data)};
        for (const waiting of [0, 32_000, 32_001, 1e9, 0]) {
          c.socket.bufferedAmount = waiting;
          c.sendAudio(new ArrayBuffer(640));
        }
        return [sent.length, c.numDropped];
    """
    assert await run(page, "connection", code) == [3, 2]


CAPTURE = """
    const [rate, factor] = x;
    const context = new OfflineAudioContext(1, rate, rate);
    await context.audioWorklet.addModule("/static/worklets/capture.js");
    const node = new AudioWorkletNode(context, "capture", {
      processorOptions: {factor, frameSamples: Math.round(rate / factor * 0.02)}});
    const tone = new OscillatorNode(context, {frequency: 440});
    tone.connect(node).connect(context.destination);
    tone.start();
    const frames = [];
    node.port.onmessage = ({data}) => frames.push([...new Int16Array(data.pcm)]);
    const rendered = await context.startRendering();
    await new Promise((resolve) => setTimeout(resolve, 200));
    return [frames, rendered.getChannelData(0).some((value) => value !== 0)];
"""


@pytest.mark.parametrize(("rate", "factor"), [(44_100, 1), (48_000, 1), (96_000, 2)])
async def test_frames_are_20_ms_at_the_native_rate_and_the_speaker_stays_silent(
    page: Visit, rate: int, factor: int
):
    frames, is_loud = await run(page, "app", CAPTURE, [rate, factor])
    size = rate // factor // 50
    assert {len(frame) for frame in frames} == {size} and len(frames) in (49, 50)
    spectrum = np.abs(np.fft.rfft(np.concatenate(frames)))
    peak_hz = np.argmax(spectrum) * rate / factor / (size * len(frames))
    assert abs(peak_hz - 440) < 1.5
    assert not is_loud
