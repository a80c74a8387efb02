"""`metronome talk` against a small server on a real socket; nothing waits for real time."""

import asyncio
import json
import struct
import sys
import types
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest
import soundfile
from rich.console import Console
from websockets.asyncio.server import ServerConnection, serve

from app import speaking, talk
from app.talk import ANSWERED, FAILED, REFUSED, TalkOptions, converse
from engine.voice.voice import VOICE_RATE
from tests.support.serving import serving as serve_for_real
from tests.support.voices import CHAR_SAMPLES, ToneVoice

Handler = Callable[[ServerConnection], Awaitable[None]]


class Notes:
    """A printer that keeps what it is given."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.problems: list[str] = []

    def event(self, event: dict[str, Any]) -> None:
        self.events.append(event)

    def problem(self, message: str) -> None:
        self.problems.append(message)


async def no_wait(seconds: float) -> None:
    await asyncio.sleep(0)


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    async with serve(handler, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        yield f"ws://127.0.0.1:{port}/v1/stream"


async def say(socket: ServerConnection, kind: str, **fields: Any) -> None:
    await socket.send(json.dumps({"type": kind, **fields}))


async def answer(socket: ServerConnection, text: str, reason: str = "stop") -> None:
    await say(socket, "response.created", response_id="r")
    await say(socket, "response.text.delta", response_id="r", delta=text)
    await say(socket, "response.done", response_id="r", reason=reason, tokens=1)


class Listener:
    """A fake server: a voice above silence starts speech, five silent chunks end it, and it is echoed."""

    def __init__(self) -> None:
        self.query: dict[str, list[str]] = {}
        self.texts: list[dict[str, Any]] = []
        self.audio = bytearray()
        self.sizes: list[int] = []
        self.num_turns = 0

    async def __call__(self, socket: ServerConnection) -> None:
        assert socket.request is not None
        self.query = parse_qs(urlsplit(socket.request.path).query)
        await say(socket, "session.created", id="s", model="fake", sample_rate=16000, budget_ms=2000)
        is_speaking, silent = False, 0
        async for message in socket:
            if isinstance(message, str):
                self.texts.append(json.loads(message))
                if self.texts[-1]["type"] == "input.commit":
                    await self.reply(socket)
                continue
            self.audio += message
            self.sizes.append(len(message))
            if self.query["turn"] == ["manual"]:
                continue
            silent = 0 if any(message) else silent + 1
            if silent == 0 and not is_speaking:
                is_speaking = True
                await say(socket, "speech.started", audio_ms=0)
            if silent == 5 and is_speaking:
                is_speaking = False
                await say(socket, "speech.stopped", audio_ms=0)
                await self.reply(socket)

    async def reply(self, socket: ServerConnection) -> None:
        self.num_turns += 1
        await say(socket, "input.transcript", text=f"turn {self.num_turns}")
        await answer(socket, f"answer {self.num_turns}")


def recording(
    folder: Path, seconds: float = 0.1, rate: int = 16_000, channels: int = 1, gap: bool = False
) -> Path:
    audio = np.full((int(seconds * rate), channels), 0.25, np.float32)
    if gap:
        third = len(audio) // 3
        audio[third : 2 * third] = 0
    path = folder / f"{seconds}-{rate}-{channels}-{gap}.wav"
    soundfile.write(path, audio, rate)
    return path


async def test_a_turn_in_server_vad_is_answered_after_silence(tmp_path: Path):
    listener, notes = Listener(), Notes()
    async with serving(listener) as url:
        status = await converse(TalkOptions(url), [recording(tmp_path)], notes, no_wait)
    assert status == ANSWERED and not notes.problems
    assert listener.query == {"sample_rate": ["16000"], "turn": ["server_vad"]}
    assert set(listener.sizes) == {640}  # 20 ms each
    assert listener.audio[:3200] == struct.pack("<h", 8192) * 1600 and not any(listener.audio[3200:])
    assert [event["type"] for event in notes.events] == [
        "session.created",
        "speech.started",
        "speech.stopped",
        "input.transcript",
        "response.created",
        "response.text.delta",
        "response.done",
        "client.timing",
    ]


async def test_several_files_are_turns_of_one_session(tmp_path: Path):
    listener, notes = Listener(), Notes()
    files = [recording(tmp_path), recording(tmp_path, rate=8_000), recording(tmp_path, 0.2)]
    async with serving(listener) as url:
        assert await converse(TalkOptions(url), files, notes, no_wait) == ANSWERED
    assert listener.num_turns == 3
    assert [event["text"] for event in notes.events if event["type"] == "input.transcript"] == [
        "turn 1",
        "turn 2",
        "turn 3",
    ]


async def test_spoken_answers_are_waited_for_reported_and_saved(tmp_path: Path):
    notes, out = Notes(), tmp_path / "answers.wav"
    async with serve_for_real(voice=ToneVoice()) as server:
        options = TalkOptions(f"ws://127.0.0.1:{server.port}/v1/stream", "manual", is_aloud=True, out=out)
        assert await converse(options, [recording(tmp_path, 0.3)] * 2, notes) == ANSWERED
        tally = server.service.conductor.tally()
    assert tally.interruptions == 0  # the second turn waited until the first answer was played
    pcm, rate = soundfile.read(out)
    said = "".join(e["delta"] for e in notes.events if e["type"] == "response.text.delta")
    assert rate == VOICE_RATE and len(pcm) == len(said) * CHAR_SAMPLES
    times = [e for e in notes.events if e["type"] == "client.timing"]
    assert len(times) == 2 and all(0 <= t["first_text_ms"] <= t["first_sound_ms"] for t in times)


def test_words_behind_a_voice_that_failed_wait_for_no_sound():
    def answered(response_id: str, *in_between: str) -> None:
        kinds = [
            "response.created",
            "response.text.delta",
            *in_between,
            "response.text.delta",
            "response.done",
        ]
        for kind in kinds:
            turns.on_event({"type": kind, "response_id": response_id})

    turns = talk.Turns()
    turns.on_event({"type": "session.created", "voice": True})
    answered("r", "warning", "response.audio.done")
    assert turns.is_answered(0)
    answered("s")
    assert not turns.is_answered(1)  # its sound is due


def test_a_cough_behind_an_answer_is_not_waited_for():
    turns = talk.Turns()
    question = [("speech.started", ""), ("speech.stopped", ""), ("input.transcript", "Who?")]
    cough = [("speech.started", ""), ("speech.stopped", ""), ("input.transcript", " ")]
    answered = [("response.created", ""), ("response.done", "")]

    def on(*events: tuple[str, str]) -> bool:
        for kind, text in events:
            turns.on_event({"type": kind, "text": text})
        return turns.is_answered(0)

    assert not on(*cough)  # nothing was answered yet
    assert on(*question, *answered)
    assert not on(*cough[:2]) and on(cough[2])
    assert not on(*question, *cough)  # it joined the question, whose answer is still owed
    assert on(*answered)


@pytest.mark.parametrize("is_saved", [False, True])
async def test_sound_is_kept_only_for_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_saved: bool):
    async def speak(socket: ServerConnection) -> None:
        async for message in socket:
            if isinstance(message, str):
                await socket.send(bytes(480))
                await answer(socket, "a")

    made: list[talk.Ears] = []

    class Ears(talk.Ears):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            made.append(self)

    monkeypatch.setattr(talk, "Ears", Ears)
    async with serving(speak) as url:
        options = TalkOptions(url, "manual", out=tmp_path / "a.wav" if is_saved else None)
        assert await converse(options, [recording(tmp_path)], Notes(), no_wait) == ANSWERED
    assert len(made[0].sound) == (480 if is_saved else 0)


async def test_a_file_that_cannot_be_written_is_told(tmp_path: Path):
    notes = Notes()
    async with serving(Listener()) as url:
        options = TalkOptions(url, out=tmp_path / "nowhere" / "answers.wav")
        with pytest.raises(talk.TalkError, match="cannot write"):
            await converse(options, [recording(tmp_path)], notes, no_wait)


async def test_a_pause_inside_a_recording_does_not_end_it(tmp_path: Path):
    listener, notes = Listener(), Notes()
    async with serving(listener) as url:
        files = [recording(tmp_path, 0.6, gap=True)]
        assert await converse(TalkOptions(url), files, notes, no_wait) == ANSWERED
    assert listener.num_turns == 2 and listener.audio.count(struct.pack("<h", 8192)) == 2 * 3200


async def test_manual_commits_and_passes_the_options(tmp_path: Path):
    listener, notes = Listener(), Notes()
    async with serving(listener) as url:
        options = TalkOptions(url + "?x=1", "manual", "be brief", 7)
        assert await converse(options, [recording(tmp_path)] * 2, notes, no_wait) == ANSWERED
    assert listener.query == {"x": ["1"], "sample_rate": ["16000"], "turn": ["manual"], "max_tokens": ["7"]}
    assert listener.texts == [
        {"type": "session.update", "instructions": "be brief"},
        {"type": "input.commit"},
        {"type": "input.commit"},
    ]
    assert len(listener.audio) == 2 * 3200


async def test_refused_at_capacity_is_status_3_with_the_hint(tmp_path: Path):
    async def refuse(socket: ServerConnection) -> None:
        await say(
            socket,
            "error",
            code="at_capacity",
            status=503,
            message="All 2 places taken.",
            retry_after_ms=4200,
        )
        await socket.close(1013, "at capacity")

    notes = Notes()
    async with serving(refuse) as url:
        assert await converse(TalkOptions(url), [recording(tmp_path)], notes, no_wait) == REFUSED
    assert notes.problems == ["refused: All 2 places taken. (retry after 4.2 s)"]


@pytest.mark.parametrize("then_close", [True, False])
async def test_an_error_ends_the_talk(tmp_path: Path, then_close: bool):
    async def fail(socket: ServerConnection) -> None:
        async for message in socket:
            if isinstance(message, str):
                await say(socket, "error", code="not_understood", status=400, message="What?")
                if then_close:
                    await socket.close(1003, "What?")

    notes = Notes()
    async with serving(fail) as url:
        options = TalkOptions(url, "manual")
        assert await converse(options, [recording(tmp_path)], notes, no_wait) == FAILED
    assert notes.problems == ["not_understood: What?"]


@pytest.mark.parametrize("code", [1000, 1011])
async def test_a_server_that_leaves_is_told(tmp_path: Path, code: int):
    async def leave(socket: ServerConnection) -> None:
        await socket.close(code, "bye")

    notes = Notes()
    async with serving(leave) as url:
        assert await converse(TalkOptions(url), [recording(tmp_path)], notes, no_wait) == FAILED
    assert notes.problems == [f"the server closed the session: {code} bye"]


async def test_no_answer_in_time_is_told(tmp_path: Path):
    async def deaf(socket: ServerConnection) -> None:
        async for _ in socket:
            pass

    async with serving(deaf) as url:
        with pytest.raises(talk.TalkError, match="no answer within"):
            await converse(TalkOptions(url, "manual", wait_s=0.05), [recording(tmp_path)], Notes(), no_wait)


def test_a_server_that_is_not_there_is_one_sentence(tmp_path: Path):
    notes = Notes()
    assert talk.main(TalkOptions("ws://127.0.0.1:9/v1/stream"), [recording(tmp_path)], notes) == FAILED
    (problem,) = notes.problems
    assert problem.startswith("cannot talk to ws://127.0.0.1:9/v1/stream:")


async def test_chunks_are_due_on_an_absolute_schedule(monkeypatch: pytest.MonkeyPatch):
    now, sent = [100.0], []

    class Socket:
        async def send(self, chunk: bytes) -> None:
            sent.append(now[0])
            now[0] += 0.007  # sending takes time, which must not add up

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(speaking.time, "monotonic", lambda: now[0])
    speaker = talk.Speaker(Socket(), 16_000, sleep)  # pyright: ignore[reportArgumentType]
    for _ in range(50):
        await speaker.send(b"")
    assert sent == pytest.approx([100 + 0.02 * i for i in range(50)])
    now[0] += 60.0
    speaker.restart()
    await speaker.send(b"")
    assert sent[-1] == now[0] - 0.007


# recordings


@pytest.mark.parametrize(
    ("rate", "sent_rate"),
    [(8_000, 8_000), (11_025, 11_025), (44_100, 44_100), (48_000, 48_000), (96_000, 48_000), (4_000, 8_000)],
)
def test_recordings_keep_their_rate_where_the_server_takes_it(tmp_path: Path, rate: int, sent_rate: int):
    samples, got = talk.read_recording(recording(tmp_path, 0.5, rate))
    assert got == sent_rate and len(samples) == pytest.approx(0.5 * sent_rate, abs=2)
    pieces = talk.chunks(samples, got)
    assert b"".join(pieces) == samples.tobytes() and len(pieces[0]) == 2 * (got // 50)


def test_channels_are_mixed_and_loud_ones_do_not_wrap(tmp_path: Path):
    path = tmp_path / "stereo.flac"
    soundfile.write(path, np.array([[1.0, 0.0], [-1.0, -1.0], [0.999, 0.999]] * 100), 16_000)
    samples, _ = talk.read_recording(path)
    assert samples[:3].tolist() == pytest.approx([16384, -32767, 32734], abs=2)


@pytest.mark.parametrize("content", [b"", b"not audio", None])
def test_unreadable_files_are_told_by_name(tmp_path: Path, content: bytes | None):
    path = tmp_path / "x.wav"
    if content is None:
        soundfile.write(path, np.zeros(0), 16_000)
    else:
        path.write_bytes(content)
    notes = Notes()
    assert talk.main(TalkOptions("ws://unused"), [path], notes) == FAILED
    assert f"cannot read {path}" in notes.problems[0]


# the microphone


async def test_without_sounddevice_the_way_to_it_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    with pytest.raises(talk.TalkError, match=r"pip install sounddevice.*libportaudio2"):
        await anext(talk.microphone(16_000))


async def test_the_microphone_streams_until_the_server_closes(monkeypatch: pytest.MonkeyPatch):
    class Stream:
        def __init__(self, **given: Any) -> None:
            assert (given["samplerate"], given["blocksize"], given["channels"]) == (48_000, 960, 1)
            self.callback = given["callback"]

        def __enter__(self) -> None:
            for i in range(300):  # more than is kept: the oldest go
                self.callback(bytes([i % 256]) * 1920, 960, None, None)

        def __exit__(self, *_: Any) -> None: ...

    fake = types.ModuleType("sounddevice")
    fake.RawInputStream, fake.PortAudioError = Stream, OSError  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "sounddevice", fake)
    heard: list[int] = []

    async def hear(socket: ServerConnection) -> None:
        async for message in socket:
            assert isinstance(message, bytes) and len(message) == 1920
            heard.append(message[0])
            if len(heard) == 250:
                await socket.close(1000, "enough")

    notes = Notes()
    async with serving(hear) as url:
        assert await converse(TalkOptions(url), [], notes) == FAILED
    assert heard == [i % 256 for i in range(50, 300)]
    assert notes.problems == ["the server closed the session: 1000 enough"]


# printing


def test_people_see_words_and_machines_see_lines(capsys: pytest.CaptureFixture[str]):
    events: list[dict[str, Any]] = [
        {"type": "session.created", "id": "s1", "model": "m", "sample_rate": 16000, "budget_ms": 2000},
        {"type": "tick", "seq": 4, "audio_ms": 20, "lateness_ms": 1.5, "tokens": 2, "kv_tokens": 30},
        {"type": "input.transcript", "text": "what is [bold]?"},
        {"type": "response.created"},
        {"type": "response.text.delta", "delta": "A "},
        {"type": "response.text.delta", "delta": "kernel."},
        {"type": "response.done", "reason": "length"},
        {"type": "warning", "message": "slow down"},
    ]
    shown = []
    for verbose in (False, True):
        out = StringIO()
        printer = talk.TextPrinter(verbose, Console(file=out, soft_wrap=True, highlight=False))
        for event in events:
            printer.event(event)
        shown.append(out.getvalue())
    quiet, verbose_text = shown
    assert "you: what is [bold]?\nanswer: A kernel. (length)\nwarning: slow down\n" in quiet
    assert "tick 4" not in quiet and "tick 4: 20 ms of audio, 1.5 ms late, 2 tokens" in verbose_text
    printer = talk.JsonPrinter()
    for event in events:
        printer.event(event)
    printer.problem("gone")
    captured = capsys.readouterr()
    assert [json.loads(line) for line in captured.out.splitlines()] == events
    assert captured.err == "metronome: gone\n"
