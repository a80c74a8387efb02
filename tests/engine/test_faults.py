"""An exception in one session's code: that session ends with an error, the beats and the others go on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from engine.conductor import Conductor
from engine.events import ResponseDone
from engine.models.null import NullFamily
from engine.null import NullEngine
from engine.outputs import Close, ToClient
from engine.scheduler import TickScheduler
from engine.session import Session
from engine.types import TurnMode
from tests.support.serving import TIMEOUT_S
from tests.support.stage import CONFIG, pcm


@pytest.mark.parametrize(
    "method",
    [
        *("open", "come_due", "take_sample", "go_on", "take_hearing", "gate.take"),
        *("on_heard", "on_result", "on_time"),
    ],
)
async def test_a_session_whose_code_raises_ends_alone(method: str, monkeypatch: pytest.MonkeyPatch):
    family = NullFamily()
    scheduler = TickScheduler(family.info.budget_s, num_slots=4, max_batch=8)
    conductor = Conductor(family, NullEngine, scheduler, cast(Any, None), lambda sample, now: None)
    said: dict[str, list[ToClient]] = {"bad": [], "good": []}

    def breaks(*args: object) -> None:
        raise ZeroDivisionError(method)

    await conductor.start()
    beat = asyncio.create_task(conductor.run())
    try:
        now = asyncio.get_running_loop().time()
        sessions = {name: Session(name, family, CONFIG, now) for name in said}
        owner, _, name = method.rpartition(".")
        monkeypatch.setattr(getattr(sessions["bad"], owner) if owner else sessions["bad"], name, breaks)
        for name, session in sessions.items():
            conductor.open(session, said[name].append)
        async with asyncio.timeout(TIMEOUT_S):
            for session in sessions.values():
                session.on_audio(pcm(1.0), now)
                conductor.carry_out(session, session.on_commit(now))
            while not (
                any(isinstance(event, Close) for event in said["bad"])
                and any(isinstance(event, ResponseDone) for event in said["good"])
            ):
                await asyncio.sleep(0.01)
        (end,) = [event for event in said["bad"] if isinstance(event, Close)]
        assert (end.error.code, end.error.close_code) == ("session_failed", 1011)
        assert not beat.done()
        assert [session.id for session in scheduler] == ["good"]
        assert not any(isinstance(event, Close) for event in said["good"])
        assert conductor.tally().faults == 1
    finally:
        beat.cancel()
        await asyncio.gather(beat, return_exceptions=True)
        await conductor.close()


async def test_audio_on_which_the_detector_fails_ends_its_session_alone():
    """Both are in one batch: the detector is asked again for each."""

    class Picky:
        sizes: list[int] = []  # noqa: RUF012 - of this test's only instance

        def detect(self, items: list[tuple[Any, np.ndarray]]) -> list[np.ndarray]:
            self.sizes.append(len(items))
            if any(np.abs(audio).max() > 0.9 for _, audio in items):
                raise ZeroDivisionError
            return [np.zeros(len(audio) // 512, np.float32) for _, audio in items]

    family, detector = NullFamily(), Picky()
    scheduler = TickScheduler(family.info.budget_s, num_slots=4, max_batch=8)
    conductor = Conductor(family, NullEngine, scheduler, cast(Any, detector), lambda sample, now: None)
    said: dict[str, list[ToClient]] = {"bad": [], "good": []}
    await conductor.start()
    try:
        now = asyncio.get_running_loop().time()
        for name, events in said.items():
            session = Session(name, family, replace(CONFIG, mode=TurnMode.SERVER_VAD), now)
            conductor.open(session, events.append)
            loud = np.full(16_000, 32_000 if name == "bad" else 3_000, "<i2")
            conductor.carry_out(session, session.on_audio(loud.tobytes(), now))
        await conductor._detect_speech()
        (end,) = [event for event in said["bad"] if isinstance(event, Close)]
        assert end.error.code == "session_failed"
        assert [session.id for session in scheduler] == ["good"]
        assert detector.sizes == [2, 1, 1]
        assert conductor.tally().faults == 1
    finally:
        await conductor.close()
