"""The conductor between session and engine: what leaves in which order. A real loop, the null engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

from engine.conductor import Conductor
from engine.events import ResponseDone, ResponseTextDelta
from engine.models.null import NullFamily
from engine.null import NullEngine
from engine.outputs import Close, ToClient
from engine.scheduler import TickScheduler
from engine.session import Session
from engine.types import SAMPLE_RATE, Hearing, Intake
from tests.support.serving import TIMEOUT_S
from tests.support.stage import CONFIG, pcm


class FailsOnLoud(NullFamily):
    """Cannot hear a loud second, nor any batch with one."""

    def __init__(self) -> None:
        super().__init__()
        self.num_batches = 0

    def hear(self, batch: Sequence[Hearing]) -> list[Intake]:
        self.num_batches += 1
        if any(hearing.audio.max(initial=0.0) > 0.5 for hearing in batch):
            raise RuntimeError("too loud")
        return super().hear(batch)


async def test_a_batch_that_cannot_be_heard_is_heard_one_by_one_and_only_the_guilty_session_ends():
    family = FailsOnLoud()
    scheduler = TickScheduler(family.info.budget_s, num_slots=4, max_batch=8)
    conductor = Conductor(family, NullEngine, scheduler, cast(Any, None), lambda sample, now: None)
    said: dict[str, list[ToClient]] = {"a": [], "loud": [], "b": []}
    await conductor.start()
    try:
        now = asyncio.get_running_loop().time()
        sessions = {name: Session(name, family, CONFIG, now) for name in said}
        for name, session in sessions.items():
            conductor.open(session, said[name].append)
        async with asyncio.timeout(TIMEOUT_S):
            while any(session._work is not None for session in sessions.values()):
                await asyncio.sleep(0.01)  # until all are ready to be heard
            for name, session in sessions.items():
                sound = pcm(1.0) if name != "loud" else b"\xff\x7f" * SAMPLE_RATE
                session.on_audio(sound, now)
                session.on_commit(now)
                scheduler.note(session)
            conductor._after_events()
            while not all(any(isinstance(e, ResponseDone) for e in said[name]) for name in ("a", "b")):
                await asyncio.sleep(0.01)
        assert family.num_batches == 4  # all at once, then each
        (end,) = [event for event in said["loud"] if isinstance(event, Close)]
        assert (end.error.code, end.error.close_code) == ("session_failed", 1011)
        assert sorted(session.id for session in scheduler) == ["a", "b"]
        for name in ("a", "b"):
            text = "".join(e.delta for e in said[name] if isinstance(e, ResponseTextDelta))
            assert text == "echo: heard 1000 ms"
        assert conductor.tally().faults == 1
    finally:
        await conductor.close()


async def test_a_cancel_reaches_the_engine_behind_the_work_that_it_is_for():
    """Two turns are committed before the first is heard: its answer is begun and cut at one instant."""
    family = NullFamily()
    engine = NullEngine(step_s=0.01)
    scheduler = TickScheduler(family.info.budget_s, num_slots=4, max_batch=8)
    conductor = Conductor(family, lambda: engine, scheduler, cast(Any, None), lambda sample, now: None)
    said: list[ToClient] = []
    await conductor.start()
    try:
        now = asyncio.get_running_loop().time()
        session = Session("a", family, CONFIG, now)
        conductor.open(session, said.append)
        async with asyncio.timeout(TIMEOUT_S):
            for _ in range(2):
                session.on_audio(pcm(1.0), now)
                conductor.carry_out(session, session.on_commit(now))
            while len(done := [e for e in said if isinstance(e, ResponseDone)]) < 2:
                await asyncio.sleep(0.01)
        first, second = done
        assert (first.reason, first.tokens, second.reason) == ("interrupted", 0, "stop")
        text = "".join(e.delta for e in said if isinstance(e, ResponseTextDelta))
        assert text == "echo: heard 1000 ms"
    finally:
        await conductor.close()
