"""The tick's step, and scheduler with limit over thousands of virtual seconds."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from statistics import median

import pytest

from engine.aimd import AimdConfig, AimdLimit
from engine.config import SessionConfig
from engine.engine import EngineLimits
from engine.models.null import NullFamily
from engine.null import NullCore
from engine.outputs import Submit
from engine.scheduler import TickScheduler
from engine.session import Session
from engine.types import Hearing, TurnMode
from tests.support.stage import Stage, pcm


def test_ended_turns_are_heard_before_those_who_still_talk():
    stage = Stage(num_slots=1)
    talkers = [stage.open(f"t{i}") for i in range(3)]
    asker = stage.open("asker")
    stage.advance(0.2)
    stage.can_hear = False
    for session in (*talkers, asker):
        stage.do(session, session.on_audio(pcm(0.5), stage.now))
    stage.do(asker, asker.on_commit(stage.now))
    for _, outputs in stage.scheduler.step(stage.now + 2.0).outputs:
        assert not outputs
    assert [h.session_id for h in stage.scheduler.take_batch(stage.do)] == ["asker"]
    assert [h.session_id for h in stage.scheduler.take_batch(stage.do)] == ["t0", "t1", "t2"]


def test_a_session_that_left_is_not_heard():
    stage = Stage(num_slots=1)
    session = stage.open()
    stage.step()
    stage.do(session, session.on_audio(pcm(0.5), stage.now))
    stage.scheduler.step(stage.now + 2.0)
    stage.scheduler.remove("a")
    assert stage.scheduler.take_batch(stage.do) == [] and len(stage.scheduler) == 0


def test_a_batch_is_bounded():
    stage = Stage()
    sessions = [stage.open(str(i)) for i in range(8)]
    stage.step()
    for session in sessions:
        stage.do(session, session.on_audio(pcm(0.5), stage.now))
        stage.do(session, session.on_commit(stage.now))
    scheduler = stage.scheduler
    scheduler._max_batch = 5
    assert (len(scheduler.take_batch(stage.do)), len(scheduler.take_batch(stage.do))) == (5, 3)


# The whole controller: sessions that talk all the time on a model that needs `base_s` for a batch and
# `each_s` for each session in it. With B = 2 s and a target of 0.3 B, about B / each_s of them can be served.

LIMITS = EngineLimits(
    max_sessions=512,
    max_session_tokens=1 << 30,
    num_kv_blocks=1 << 30,
    block_size_tokens=16,
    blocks_per_session=1,
    max_batch_tokens=1 << 20,
)
CONFIG = SessionConfig(
    mode=TurnMode.CONTINUOUS, instructions="", max_session_tokens=1 << 30, idle_limit_s=1e9
)
BUDGET_S = 2.0
AUDIO = pcm(0.1)


@dataclass
class World:
    """Virtual time; one event at a time: a slot comes due, a batch is done, sessions come and go."""

    limit: AimdLimit
    each_s: float = 0.04
    base_s: float = 0.02
    talking: float = 1.0  # part of the sessions that talk
    life_s: float = 200.0  # mean length of a session
    wanted: int = 100  # callers who are there or would like to be
    stall_at: float | None = None  # one batch takes three budgets longer

    def __post_init__(self) -> None:
        self.now = 1000.0
        self.rng = random.Random(7)
        self.family = NullFamily(BUDGET_S)
        self.core = NullCore(LIMITS, tokens_per_step=100)
        self.scheduler = TickScheduler(BUDGET_S, 8, max_batch=16)
        self.ends: dict[str, float] = {}
        self.busy: tuple[float, list[Hearing]] | None = None
        self.caps: list[int] = []
        self.active: list[int] = []
        self.lateness: list[float] = []
        self.num_opened = 0

    def run(self, seconds: float) -> World:
        end = self.now + seconds
        while self.now < end:
            slot = self.scheduler.next_due() or self.now
            self.now = max(self.now, min(slot, self.busy[0] if self.busy else slot))
            if self.busy and self.busy[0] <= self.now:
                self._heard(self.busy[1])
                self.busy = None
            if slot <= self.now:
                self._tick()
            if not self.busy and (batch := self.scheduler.take_batch(lambda session, outputs: None)):
                took = self.base_s + self.each_s * len(batch)
                if self.stall_at is not None and self.now >= self.stall_at:
                    took, self.stall_at = took + 3 * BUDGET_S, None
                self.busy = (self.now + took, batch)
        return self

    def _tick(self) -> None:
        self._come_and_go()
        for sample in self.scheduler.step(self.now).samples:
            self.limit.on_tick(self.now, sample.lateness_s, sample.num_misses, len(self.scheduler))
            self.lateness += sample.lateness_s
        self.caps.append(self.limit.whole_cap)
        self.active.append(len(self.scheduler))

    def _come_and_go(self) -> None:
        for session in self.scheduler:
            if self.ends[session.id] < self.now:
                self.scheduler.remove(session.id)
                self.core.end(session.id, 0)
            elif int(session.id) % 100 < 100 * self.talking:
                session.on_audio(AUDIO, self.now)
        while len(self.scheduler) < min(self.wanted, self.limit.whole_cap):
            session = Session(str(self.num_opened), self.family, CONFIG, self.now)
            self.num_opened += 1
            self.ends[session.id] = self.now + self.rng.expovariate(1 / self.life_s)
            self.scheduler.add(session)
            self._submit(session, session.open())

    def _heard(self, batch: list[Hearing]) -> None:
        for hearing, intake in zip(batch, self.family.hear(batch), strict=True):
            if (session := self.scheduler.get(hearing.session_id)) is not None:
                self._submit(session, session.on_heard(intake, hearing.is_final, self.now))

    def _submit(self, session: Session, outputs: list) -> None:
        """The engine answers in no time: what the model costs is in `busy`."""
        for output in outputs:
            if isinstance(output, Submit):
                self.core.submit(replace(output.work, max_tokens=min(output.work.max_tokens, 4)))
        while self.core.has_work:
            for result in self.core.step():
                owner = self.scheduler.get(result.session_id)
                if owner is not None:
                    owner.on_result(result, self.now)
                    self.scheduler.note(owner)


def limit(initial: int) -> AimdLimit:
    return AimdLimit(AimdConfig(budget_s=BUDGET_S, initial=initial, maximum=100))


def settled(values: list) -> list:
    return values[len(values) // 2 :]


@pytest.mark.parametrize("initial", [1, 30, 100])
def test_it_settles_at_what_can_be_served_from_any_start(initial: int):
    world = World(limit(initial)).run(2000)
    caps, late = settled(world.caps), sorted(settled(world.lateness))
    assert 35 <= median(caps) <= 50  # 2 s / 40 ms, less for the batches' base
    assert max(caps) <= 1.35 * min(caps) + 1  # no swings
    assert late[len(late) // 2] < 0.3 * BUDGET_S
    assert late[int(0.99 * len(late))] < 2 * BUDGET_S


def test_one_stall_moves_the_cap_by_one_step_at_most():
    calm = World(limit(10), wanted=9).run(600)
    before = calm.limit.whole_cap
    calm.stall_at = calm.now + 5
    calm.run(40)
    assert before - calm.limit.whole_cap <= max(1, round(0.1 * before) + 1)
    assert calm.limit.num_cuts <= 1


def test_two_thirds_silent_do_not_let_too_many_in():
    world = World(limit(8), talking=1 / 3).run(2000)
    silent_cap = median(settled(world.caps))
    assert silent_cap <= 3 * 50
    # Then everybody talks at once: whoever is inside must still be served, or nearly so.
    world.talking, world.lateness = 1.0, []
    world.run(10)
    late = sorted(world.lateness)
    assert late[len(late) // 2] < 2 * BUDGET_S


def test_after_an_overload_it_recovers():
    world = World(limit(30)).run(1000)
    world.each_s = 0.12  # the machine is slower for a while: a third can be served
    world.run(1500)
    slow = median(settled(world.caps))
    world.each_s = 0.04
    world.run(1500)
    assert slow <= 20
    assert median(world.caps[-100:]) >= 35
