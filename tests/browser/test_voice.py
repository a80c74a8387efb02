"""What the page's loudspeaker plays, and how it falls silent: the null engine, and a voice that hums."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect

from engine.voice.voice import VOICE_RATE, Sound16, Voice
from tests.support.browsing import QUESTION, Visit, add_tap, begin, visit
from tests.support.serving import Serving, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
SAMPLES_PER_CHAR = VOICE_RATE // 10  # "echo: heard 2500 ms" lasts about 2 s


class Hum(Voice):
    """A tone as long as its text."""

    name = "hum"
    slowness = 1
    amplitude = 8000

    def speak(self, text: str) -> Sound16:
        t = np.arange(self.slowness * len(text) * SAMPLES_PER_CHAR)
        return (self.amplitude * np.sin(2 * np.pi * 300 * t / VOICE_RATE)).astype(np.int16)


class SlowHum(Hum):
    slowness = 8


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Serving]:
    async with serving(voice=Hum()) as running:
        add_tap(running)
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def slow_server() -> AsyncIterator[Serving]:
    """Its answers last for a quarter of a minute."""
    async with serving(voice=SlowHum()) as running:
        add_tap(running)
        yield running


class Wire:
    """What went over the page's sockets."""

    def __init__(self, page: Visit) -> None:
        self.sent: list[dict] = []
        self.received: list[dict] = []
        page.page.on("websocket", self._watch)

    def _watch(self, socket) -> None:
        socket.on("framesent", lambda data: self._keep(self.sent, data))
        socket.on("framereceived", lambda data: self._keep(self.received, data))

    @staticmethod
    def _keep(events: list[dict], data: str | bytes) -> None:
        if isinstance(data, str):
            events.append(json.loads(data))

    def played(self, response_id: str | None = None) -> list[int]:
        """What the page reported, of one response or of all."""
        reports = [event for event in self.sent if event["type"] == "response.played"]
        return [e["played_ms"] for e in reports if response_id in (None, e["response_id"])]

    def of(self, kind: str) -> list[dict]:
        return [event for event in self.received if event["type"] == kind]


async def sounding_ms(page: Visit) -> float:
    """How much of what the loudspeaker was given is sound."""
    samples, rate = await page.heard()
    return 1000 * np.count_nonzero(np.abs(samples) > 1e-4) / rate if len(samples) else 0.0


async def test_an_answer_is_played_whole_and_reported_to_the_millisecond(browser: Browser, server: Serving):
    async with visit(browser, server.port, own_microphone=True, recorded=True) as page:
        wire = Wire(page)
        await begin(page)
        await page.say(*QUESTION)
        await page.until_floor("answering")
        await page.until_floor("listening")  # the sound has ended
        (done,) = wire.of("response.audio.done")
        played = wire.played()
        assert played == sorted(played) and played[-1] == done["duration_ms"]
        assert len(played) >= done["duration_ms"] / 1000  # it goes on telling while it plays
        assert abs(await sounding_ms(page) - done["duration_ms"]) < 0.05 * done["duration_ms"]
        # It was unlocked in the click: Chromium's autoplay rules are on, and so it is in Safari.
        assert await page.page.evaluate("() => testTap.contextStates") == ["running"]
        entry = page.entries("server")
        await expect(entry).to_have_attribute("data-state", "done")
        await expect(entry.locator(".unheard")).to_have_text("")
        await expect(entry.locator(".mark")).to_have_text("")


async def silent(page: Visit) -> float:
    """Wait for silence that stays; how much sounded before. An answer of these tests has no such pause."""
    sounded = -1.0

    async def condition() -> bool:
        nonlocal sounded
        before, sounded = sounded, await sounding_ms(page)
        await asyncio.sleep(0.5)
        return before == sounded

    await page.until(condition, "fell silent")
    return sounded


async def interrupted(page: Visit, wire: Wire) -> int:
    """What holds after any interruption; gives the milliseconds that the page said it played."""
    entry = page.entries("server").first
    await expect(entry).to_have_attribute("data-state", "cut")
    await expect(entry.locator(".unheard")).not_to_have_text("")
    heard = await entry.locator(".heard").inner_text()
    assert "echo: heard 2000 ms".startswith(heard.strip()[:5])

    async def told() -> bool:
        return bool(wire.of("response.flush")) and bool(wire.played())

    await page.until(told, "told")
    sounded = await silent(page)
    number = wire.of("response.flush")[0]["response_id"]
    played = wire.played(number)
    assert played == sorted(played)
    sent = [event for event in wire.of("response.audio") if event["response_id"] == number]
    total = sum(event["duration_ms"] for event in sent)
    assert 0 < played[-1] < total
    assert abs(sounded - played[-1]) < 500  # what is in the device's buffer is not heard yet
    return played[-1]


async def until_sounding(page: Visit, at_least_ms: float) -> None:
    async def condition() -> bool:
        return await sounding_ms(page) > at_least_ms

    await page.until(condition, f"{at_least_ms} ms sounded")


async def test_speech_over_an_answer_silences_it_at_once(
    browser: Browser, slow_server: Serving, monkeypatch: pytest.MonkeyPatch
):
    async with visit(browser, slow_server.port, own_microphone=True, recorded=True) as page:
        wire = Wire(page)
        await begin(page)
        await page.say(*QUESTION)
        await until_sounding(page, 800)
        speaking = asyncio.create_task(page.say(*QUESTION))
        await expect(page.entries("server")).to_have_attribute("data-state", "cut")
        monkeypatch.setattr(SlowHum, "amplitude", 0)  # the next answer shall not be taken for this one
        await interrupted(page, wire)
        await expect(page.entries("server").first.locator(".mark")).to_have_text("interrupted here")
        await speaking
        await expect(page.entries("server")).to_have_count(2)  # and is answered
        heard = [event["text"] for event in wire.of("response.heard")]
        assert len(heard) == 1
        shown = await page.entries("server").first.locator(".heard").inner_text()
        assert shown.strip() == heard[0].strip()  # the page shows what the conversation keeps


@pytest.mark.parametrize("way", ["button", "escape"])
async def test_an_answer_can_be_stopped_by_hand(browser: Browser, slow_server: Serving, way: str):
    async with visit(browser, slow_server.port, own_microphone=True, recorded=True) as page:
        wire = Wire(page)
        await begin(page)
        await page.say(*QUESTION)
        await until_sounding(page, 500)
        if way == "button":
            await page["hush"].click()
        else:
            await page.page.keyboard.press("Escape")
        await interrupted(page, wire)
        await page.until_floor("listening")
        assert [event["type"] for event in wire.sent].count("response.cancel") == 1


async def test_without_voice_the_answer_is_text_only(browser: Browser, server: Serving):
    async with visit(
        browser, server.port, own_microphone=True, recorded=True, settings='{"voice": false}'
    ) as page:
        wire = Wire(page)
        await begin(page)
        await page.say(*QUESTION)
        await expect(page.entries("server")).to_have_attribute("data-state", "done")
        assert not wire.of("response.audio") and not wire.played()
        await page["open-settings"].click()
        await page.page.get_by_label("Speak the answers").check()
        await page.page.get_by_role("button", name="Save").click()
        await page.say(*QUESTION)
        await until_sounding(page, 500)  # from the next answer on


async def test_the_end_of_the_conversation_is_the_end_of_the_sound(browser: Browser, slow_server: Serving):
    async with visit(browser, slow_server.port, own_microphone=True, recorded=True) as page:
        await begin(page)
        await page.say(*QUESTION)
        await until_sounding(page, 300)
        await page["start"].click()
        await page.until_state("idle")
        await slow_server.until_empty()
        assert await silent(page) < 5000  # of more than 15 s
        await expect(page.entries("server")).to_have_attribute("data-state", "cut")
