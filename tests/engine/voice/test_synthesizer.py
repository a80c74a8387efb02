"""The voice's thread: who is first, what is dropped, what a fault costs."""

from __future__ import annotations

import asyncio
import threading

import pytest

from engine.types import Utterance
from engine.voice.synthesizer import Synthesizer
from engine.voice.voice import Sound16
from tests.support.serving import TIMEOUT_S
from tests.support.voices import CHAR_SAMPLES, ToneVoice


class Gated(ToneVoice):
    """Waits for the test before each clause."""

    def __init__(self) -> None:
        self.may_speak = threading.Semaphore(0)
        self.said: list[str] = []

    def speak(self, text: str) -> Sound16:
        assert self.may_speak.acquire(timeout=TIMEOUT_S)
        self.said.append(text)
        if text == "unspeakable":
            raise ValueError(text)
        return super().speak(text)


class Rig:
    def __init__(self) -> None:
        self.voice = Gated()
        self.results: asyncio.Queue[tuple[Utterance, bytes | None]] = asyncio.Queue()
        self.durations: list[tuple[float, float]] = []
        self.synthesizer = Synthesizer(
            self.voice,
            lambda *result: self.results.put_nowait(result),
            lambda *took: self.durations.append(took),
        )

    def say(self, session: str, text: str, needed_at: float = 0.0) -> None:
        self.synthesizer.say(Utterance(session, f"{session}-1", 1, text, needed_at))

    async def spoken(self) -> tuple[str, int | None]:
        self.voice.may_speak.release()
        async with asyncio.timeout(TIMEOUT_S):
            utterance, pcm = await self.results.get()
        return utterance.text, None if pcm is None else len(pcm)


@pytest.fixture
async def rig():
    rig = Rig()
    yield rig
    for _ in range(10):
        rig.voice.may_speak.release()
    rig.synthesizer.close()


async def test_whose_playback_runs_dry_first_is_first(rig: Rig):
    rig.say("a", "runs already", 5.0)
    for session, needed_at in (("b", 9.0), ("c", 1.0), ("d", 4.0)):
        rig.say(session, session, needed_at)
    assert rig.synthesizer.num_waiting == 3
    assert [(await rig.spoken())[0] for _ in range(4)] == ["runs already", "c", "d", "b"]
    assert rig.synthesizer.num_waiting == 0 and len(rig.durations) == 4
    assert all(0 <= voice_s <= delay_s for voice_s, delay_s in rig.durations)


async def test_what_was_hushed_is_never_spoken(rig: Rig):
    rig.say("a", "first")
    rig.say("b", "second")
    rig.say("c", "third")
    rig.synthesizer.hush("b")
    rig.synthesizer.hush("nobody")
    assert [(await rig.spoken())[0] for _ in range(2)] == ["first", "third"]
    assert rig.voice.said == ["first", "third"]


async def test_a_fault_costs_one_clause(rig: Rig):
    rig.say("a", "unspeakable")
    rig.say("b", "fine")
    assert await rig.spoken() == ("unspeakable", None)
    assert await rig.spoken() == ("fine", 2 * len("fine") * CHAR_SAMPLES)
    assert rig.synthesizer.num_failures == 1
