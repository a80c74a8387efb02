"""Permits and refusals, with a clock and a jitter of our own."""

import random
from collections.abc import Callable

import pytest

from app.gate import Gate, Permit, Refusal
from engine.aimd import AimdConfig, AimdLimit
from engine.conductor import Phase
from engine.engine import EngineLimits
from engine.null import NullEngine


class Middle(random.Random):
    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2


def limits(**changes: int) -> EngineLimits:
    given = {
        "max_sessions": 100,
        "max_session_tokens": 4096,
        "num_kv_blocks": 1000,
        "block_size_tokens": 16,
        "blocks_per_session": 10,
        "max_batch_tokens": 2048,
    }
    return EngineLimits(**(given | changes))


class FakeServer:
    """The conductor, as the gate sees it."""

    def __init__(self, phase: Phase = Phase.READY, **changes: int) -> None:
        self.phase = phase
        self.engine: NullEngine | None = NullEngine(limits(**changes))


def make(cap: int = 3, hard: int = 200, clock: Callable[[], float] = lambda: 0.0, **changes: int) -> Gate:
    aimd = AimdLimit(AimdConfig(budget_s=2.0, initial=cap, maximum=200))
    return Gate(aimd, hard, FakeServer(Phase.READY, **changes), clock, Middle())


def enter(gate: Gate) -> Permit:
    permit = gate.enter()
    assert isinstance(permit, Permit)
    return permit


def refused(gate: Gate) -> Refusal:
    refusal = gate.enter()
    assert isinstance(refusal, Refusal)
    return refusal


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "load"),
        ({"max_sessions": 3, "cap": 50}, "slots"),
        ({"hard": 3, "cap": 50}, "slots"),
        ({"num_kv_blocks": 39, "cap": 50}, "kv_cache"),
    ],
)
def test_three_fit_by_each_bound_and_the_fourth_is_told_why(changes: dict[str, int], reason: str):
    bounds = {"cap": 3, "hard": 200} | changes
    gate = make(bounds.pop("cap"), bounds.pop("hard"), lambda: 0.0, **bounds)
    for _ in range(3):
        enter(gate)
    refusal = refused(gate)
    assert (refusal.code, refusal.reason) == ("at_capacity", reason)
    assert "3 places" in refusal.message and "try again" in refusal.message
    assert (gate.cap, gate.free, gate.in_flight) == (3, 0, 3)
    assert (gate.num_admitted, gate.refused) == (3, {reason: 1})


def test_a_permit_ends_exactly_once():
    gate = make()
    permit = enter(gate)
    enter(gate)
    for _ in range(3):
        permit.end()
    assert permit.ended and gate.in_flight == 1
    with pytest.raises(RuntimeError, match="the session broke"), enter(gate):
        assert gate.in_flight == 2
        raise RuntimeError("the session broke")
    assert gate.in_flight == 1


def test_a_cap_below_what_is_in_flight_evicts_nobody():
    gate = make(cap=10)
    permits = [enter(gate) for _ in range(10)]
    limit = gate._limit
    for tick in range(10):
        limit.on_tick(2.0 * tick, [9.0] * 10, 0, gate.in_flight)
    assert (gate.cap, gate.free, gate.in_flight) == (9, 0, 10)
    permits.pop().end()
    refused(gate)
    permits.pop().end()
    enter(gate)


@pytest.mark.parametrize(
    ("phase", "code"),
    [(Phase.STARTING, "starting"), (Phase.DRAINING, "draining"), (Phase.FAILED, "engine_failed")],
)
def test_phases_refuse_with_their_own_code(phase: Phase, code: str):
    gate = Gate(AimdLimit(AimdConfig(budget_s=2.0)), 10, FakeServer(phase), lambda: 0.0)
    refusal = refused(gate)
    assert refusal.code == refusal.reason == code
    assert refusal.retry_after_ms > 0 and gate.free == 0 and gate.refused == {code: 1}


def test_a_rebuilt_engine_opens_the_gate_and_counts_who_is_still_inside():
    server = FakeServer()
    gate = Gate(AimdLimit(AimdConfig(budget_s=2.0, initial=2)), 10, server, lambda: 0.0)
    held = enter(gate)
    server.phase, engine, server.engine = Phase.STARTING, server.engine, None
    assert refused(gate).code == "starting" and gate.cap == 0
    server.phase, server.engine = Phase.READY, engine
    enter(gate)
    assert refused(gate).code == "at_capacity"
    held.end()
    enter(gate)


def test_the_retry_hint_follows_recent_turnover_and_rivals():
    now = [0.0]
    gate = make(cap=2, clock=lambda: now[0])
    permits = [enter(gate), enter(gate)]
    assert refused(gate).retry_after_ms == Gate.DEFAULT_RETRY_MS  # nobody ever left
    for _ in range(20):  # a place gets free every 4 s
        now[0] += 4.0
        permits.pop(0).end()
        permits.append(enter(gate))
    now[0] += 4.0
    assert refused(gate).retry_after_ms == 4000
    for _ in range(38):
        refused(gate)
    assert refused(gate).retry_after_ms == 8000  # 40 refusals for 20 places: two compete for each
    for _ in range(2000):
        refused(gate)
    assert refused(gate).retry_after_ms == Gate.MAX_RETRY_MS


def test_hints_are_jittered_and_bounded():
    server = FakeServer(Phase.STARTING)
    gate = Gate(AimdLimit(AimdConfig(budget_s=2.0)), 10, server, lambda: 0.0, random.Random(7))
    hints = {refused(gate).retry_after_ms for _ in range(100)}
    assert len(hints) > 90 and min(hints) >= 2500 and max(hints) <= 7500


def test_in_flight_is_right_after_any_sequence():
    gate = make(cap=20)
    rng = random.Random(1)
    held: list[Permit] = []
    for _ in range(5000):
        if rng.random() < 0.6:
            answer = gate.enter()
            if isinstance(answer, Permit):
                held.append(answer)
            else:
                assert len(held) == 20
        elif held:
            held.pop(rng.randrange(len(held))).end()
        assert gate.in_flight == len(held) and gate.free == 20 - len(held)
