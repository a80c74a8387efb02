"""Sessions that outgrow their window, in the real engine with the tiny model; W = 64, blocks of 16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from engine.types import Finish
from tests.engine.vllm.sink_window.windowed import (
    BLOCK,
    CHUNK,
    NUM_SESSIONS,
    SINKS,
    W,
    begin,
    blocks_per_session,
    more,
    prompt,
    settings,
)

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def engine_core(family) -> Iterator:
    from engine.vllm.loading import load

    core = load(family.engine_recipe(), settings())
    yield core
    core.shutdown()


def test_a_session_holds_the_same_blocks_from_its_window_on_to_its_last_token(stepper):
    limits = stepper.core.limits
    steps_in_flight = 1 if stepper.core._core.batch_queue is None else 2
    assert limits.blocks_per_session == blocks_per_session()
    works = [begin(stepper, "a", 150)] + [more(stepper, "a", 80, 5, seed) for seed in range(9)]
    works += [more(stepper, "a", limits.max_session_tokens - 150 - 9 * 84 - 1)]
    peak, parked = 0, set()
    for index, work in enumerate(works):
        stepper.submit(work)
        while stepper.final(work) is None:
            stepper.step()
            peak = max(peak, stepper.core.stats().kv_blocks_used)
        assert stepper.final(work).finish is (Finish.LENGTH if work.max_tokens else Finish.FED)
        stepper.run_idle()
        if index:
            parked.add(stepper.core.stats().kv_blocks_used)
    assert stepper.final(works[-1]).num_kv_tokens == limits.max_session_tokens - 1
    assert peak <= blocks_per_session(steps_in_flight)
    assert max(parked) <= 2 + W // BLOCK + 1  # freed when it parks, not when it goes on


def test_sessions_beyond_the_pools_tokens_go_on_side_by_side(stepper):
    """Six sessions of 700 tokens in a pool of fewer tokens than one of them has."""
    limits = stepper.core.limits
    assert limits.num_kv_blocks // limits.blocks_per_session == NUM_SESSIONS
    assert limits.num_kv_blocks * BLOCK < NUM_SESSIONS * 700 / 4
    names = [f"s{i}" for i in range(NUM_SESSIONS)]
    assert stepper.run(*(begin(stepper, name) for name in names)) == [Finish.FED] * NUM_SESSIONS
    extra = begin(stepper, "extra")
    stepper.submit(extra)
    assert "cannot hold one more whole session" in stepper.final(extra).error
    for seed in range(5):
        works = [more(stepper, name, 110, 10, seed) for name in names]
        assert stepper.run(*works) == [Finish.LENGTH] * NUM_SESSIONS


def test_an_old_session_answers_the_same_beside_others(stepper):
    def talk(name: str) -> list[int]:
        tokens = []
        stepper.run(begin(stepper, name))
        for seed in range(4):
            work = more(stepper, name, 70, 12, seed)
            stepper.submit(work)
            stepper.step_until(lambda work=work: stepper.final(work))
            tokens += stepper.tokens(work)
        return tokens

    alone = talk("alone")
    crowd = [begin(stepper, f"crowd{i}", 120, 300) for i in range(4)]
    stepper.submit(*crowd)
    assert talk("again") == alone
    for work in crowd:
        stepper.cancel(work.session_id)


def test_a_lone_session_is_taken_in_by_chunks_too(stepper):
    steps = stepper.core.stats().num_steps
    assert stepper.run(begin(stepper, "a", 4 * CHUNK)) == [Finish.FED]
    assert stepper.core.stats().num_steps - steps >= 4
    assert stepper.core.limits.max_batch_tokens > 2 * CHUNK


@pytest.mark.parametrize("length", [SINKS + 1, 400])
def test_a_longer_head_than_is_kept_is_refused_and_nobody_else_notices(stepper, length):
    bystander = begin(stepper, "bystander", 100, 30)
    stepper.submit(bystander)
    stepper.step()
    work = replace(stepper.work("a", prompt(420)), num_head_tokens=length)
    stepper.submit(work)
    result = stepper.final(work)
    assert result.finish is Finish.REFUSED
    assert f"has {length} tokens; this server keeps up to {SINKS} for ever: shorten" in result.error
    stepper.step_until(lambda: stepper.final(bystander))
    assert stepper.final(bystander).finish is Finish.LENGTH


def test_a_head_cannot_change(stepper):
    stepper.run(begin(stepper, "a"))
    work = replace(stepper.work("a", prompt(5)), num_head_tokens=SINKS - 1)
    stepper.submit(work)
    assert "head cannot change: it has 20 tokens, this work says 19" in stepper.final(work).error


def test_aborts_at_any_moment_leave_nothing(stepper):
    for moment in range(12):
        work = begin(stepper, f"a{moment}", 200, 8)
        stepper.submit(work)
        for _ in range(moment):
            if stepper.final(work) is None:
                stepper.step()
        stepper.end(work.session_id)
    stepper.run_idle()
    stepper.check_empty()
    (manager,) = stepper.scheduler.kv_cache_manager.coordinator.single_type_managers
    assert not manager.heads
