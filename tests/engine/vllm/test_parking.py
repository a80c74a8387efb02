"""512 sessions that wait cost a step nothing: nothing in it looks at them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from engine.types import Finish

pytestmark = pytest.mark.vllm

NUM_PARKED = 512


@pytest.fixture(scope="module")
def module_stepper(family) -> Iterator:
    from engine.vllm.core import SessionCore
    from engine.vllm.loading import load
    from tests.engine.vllm.stepper import SETTINGS, Stepper

    settings = replace(
        SETTINGS,
        max_sessions=NUM_PARKED + 8,
        max_session_tokens=63,
        max_batch_tokens=1024,
        kv_cache_bytes=32 << 20,
    )
    stepper = Stepper(SessionCore(load(family.engine_recipe(), settings), "audio"))
    yield stepper
    stepper.core.shutdown()


@pytest.fixture
def parked(stepper):
    works = [stepper.work(f"p{i}", (10 + i % 200, 11)) for i in range(NUM_PARKED)]
    assert stepper.run(*works) == [Finish.FED] * NUM_PARKED
    stepper.run_idle()
    return stepper


def watch(objects) -> Counter[str]:
    """Count from now on which attributes of these objects are read, by name."""
    reads: Counter[str] = Counter()

    def watching(cls: type) -> type:
        def read(self, name):
            reads[name] += 1
            return object.__getattribute__(self, name)

        return type(f"Watched{cls.__name__}", (cls,), {"__getattribute__": read, "__slots__": ()})

    classes: dict[type, type] = {}
    for watched in objects:
        cls = type(watched)
        watched.__class__ = classes.setdefault(cls, watching(cls))
    return reads


def test_parked_sessions_are_in_no_queue_and_leave_the_engine_idle(parked):
    scheduler = parked.scheduler
    assert len(scheduler.parked) == NUM_PARKED
    assert not scheduler.waiting and not scheduler.kv_holding_waiting and not scheduler.deferred_waiting
    assert scheduler.get_request_counts() == (0, 0)
    assert scheduler.get_num_unfinished_requests() == 0
    assert not parked.core.has_work()


def test_a_step_reads_nothing_of_a_parked_session(parked):
    runner = parked.core._core.model_executor.driver_worker.worker.model_runner
    requests = watch(parked.scheduler.parked.values())
    states = watch(list(runner.requests.values()))
    active = parked.work("active", (20, 21, 22), 20)
    assert parked.run(active) == [Finish.LENGTH]
    assert not requests
    assert not states


def test_a_parked_session_among_512_goes_on_where_it_was(parked):
    work, fresh = parked.work("p100", (30, 31), 8), parked.work("fresh", (110, 11, 30, 31), 8)
    assert parked.run(work, fresh) == [Finish.LENGTH] * 2
    assert parked.tokens(work) == parked.tokens(fresh)
    assert len(parked.scheduler.parked) == NUM_PARKED + 1


def test_parked_sessions_go_on_holding_their_slots(parked):
    room = parked.core.limits.max_sessions - NUM_PARKED
    works = [parked.work(f"n{i}", (20, 21), 2) for i in range(room + 1)]
    assert parked.run(*works) == [Finish.LENGTH] * room + [Finish.REFUSED]
    for i in range(10):
        parked.end(f"p{i}")
    parked.run_idle()
    assert parked.scheduler.num_waiting_for_streaming_input == len(parked.scheduler.parked)
    assert parked.run(parked.work("again", (20,), 2)) == [Finish.LENGTH]


def test_all_parked_sessions_wake_in_one_batch(parked):
    works = [parked.work(f"p{i}", (30, 31, 32), 2) for i in range(NUM_PARKED)]
    steps = parked.core.stats().num_steps
    assert parked.run(*works) == [Finish.LENGTH] * NUM_PARKED
    assert parked.core.stats().num_steps - steps < 6  # 1536 tokens in batches of 1024, then one more each
