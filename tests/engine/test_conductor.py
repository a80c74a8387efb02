"""The conductor between session and engine: what leaves in which order. A real loop, the null engine."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from engine.conductor import Conductor
from engine.events import ResponseDone, ResponseTextDelta
from engine.models.null import NullFamily
from engine.null import NullEngine
from engine.outputs import ToClient
from engine.scheduler import TickScheduler
from engine.session import Session
from tests.support.serving import TIMEOUT_S
from tests.support.stage import CONFIG, pcm


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
