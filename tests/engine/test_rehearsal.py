"""The rehearsal over the null engine: what it covers, and that nothing is left of it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from engine.conductor import Conductor
from engine.engine import EngineError
from engine.models.null import NullFamily
from engine.null import DEFAULT_LIMITS, NullEngine
from engine.rehearsal import rehearse
from engine.scheduler import MAX_BATCH, TickScheduler
from engine.tally import Tally
from engine.types import Hearing, Intake, TurnMode, Work
from tests.support.serving import TIMEOUT_S
from tests.support.stage import CONFIG


class Listener(NullFamily):
    """Notes the sizes of the batches it hears."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[int] = []

    def hear(self, batch: Sequence[Hearing]) -> list[Intake]:
        self.batches.append(len(batch))
        return super().hear(batch)


class Recorder(NullEngine):
    """Notes the works it is given."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.works: list[Work] = []

    def submit(self, batch: Sequence[Work]) -> None:
        self.works += batch
        super().submit(batch)


@contextlib.asynccontextmanager
async def conducted(engine: NullEngine, family: NullFamily | None = None) -> AsyncIterator[Conductor]:
    family = family or NullFamily()
    scheduler = TickScheduler(family.info.budget_s, num_slots=8, max_batch=MAX_BATCH)
    conductor = Conductor(family, lambda: engine, scheduler, cast(Any, None), lambda sample, now: None)
    await conductor.start()
    beat = asyncio.create_task(conductor.run())
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield conductor
    finally:
        beat.cancel()
        await asyncio.gather(beat, return_exceptions=True)
        await conductor.close()


async def until_empty(engine: NullEngine) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while engine.stats().num_sessions or engine.stats().kv_blocks_used:
            await asyncio.sleep(0.01)


async def test_one_session_speaks_then_many_at_once_and_nothing_is_left():
    engine, family = Recorder(), Listener()
    async with conducted(engine, family) as conductor:
        await rehearse(conductor, CONFIG, num_together=MAX_BATCH + 1)
        answered = {work.session_id for work in engine.works if work.max_tokens}
        assert answered == {"rehearsal", *(f"rehearsal-{i}" for i in range(MAX_BATCH + 1))}
        assert family.batches[-2:] == [1, MAX_BATCH]
        assert len(conductor.scheduler) == 0
        assert conductor.tally() == Tally()
        await until_empty(engine)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the part in which many speak: the other takes seconds."""

    async def nothing(*_: Any) -> None:
        pass

    monkeypatch.setattr("engine.rehearsal._alone", nothing)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize(
    "limits",
    [
        pytest.param(replace(DEFAULT_LIMITS, max_sessions=3), id="three slots"),
        pytest.param(replace(DEFAULT_LIMITS, num_kv_blocks=3 * 512 + 511), id="memory for three"),
    ],
)
async def test_no_more_sessions_speak_than_the_engine_holds(limits):
    engine = Recorder(limits=limits)
    async with conducted(engine) as conductor:
        await rehearse(conductor, CONFIG, num_together=MAX_BATCH + 1)
        assert len({work.session_id for work in engine.works}) == 3
        await until_empty(engine)


@pytest.mark.usefixtures("at_once")
async def test_a_model_that_only_listens_all_the_time_rehearses_in_its_mode():
    family = NullFamily(budget_s=0.2)
    family.info = replace(family.info, turn_modes=(TurnMode.CONTINUOUS,))
    engine = Recorder()
    async with conducted(engine, family) as conductor:
        config = replace(CONFIG, mode=TurnMode.CONTINUOUS, budget_s=0.2, backlog_limit_s=0.4)
        await rehearse(conductor, config, num_together=5)
        assert len({work.session_id for work in engine.works if work.max_tokens}) == 5
        await until_empty(engine)


@pytest.mark.usefixtures("at_once")
async def test_a_session_that_is_refused_fails_the_rehearsal_and_the_others_are_ended():
    engine = NullEngine()
    async with conducted(engine) as conductor:
        with pytest.raises(EngineError, match="rehearsal failed"):
            await rehearse(conductor, replace(CONFIG, max_session_tokens=4), num_together=5)
        assert len(conductor.scheduler) == 0
        await until_empty(engine)


@pytest.mark.usefixtures("at_once")
async def test_a_model_that_hears_nothing_fails_the_rehearsal_at_once():
    class Deaf(NullFamily):
        def hear(self, batch: Sequence[Hearing]) -> list[Intake]:
            return [Intake() for _ in batch]

    async with conducted(NullEngine(), Deaf()) as conductor:
        with pytest.raises(EngineError, match="rehearsal failed: Nothing was heard"):
            await rehearse(conductor, CONFIG, num_together=2)
