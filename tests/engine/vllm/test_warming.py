"""The warm-up: batches of all sessions and of each power of two, by all ways in which sessions sample."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.engine import EngineError
from engine.types import Sampling
from engine.vllm.warming import warm_up
from tests.engine.vllm.stepper import SETTINGS, Stepper

WITH_TOP_P = Sampling(temperature=0.7, top_p=0.8, top_k=5, stop_token_ids=(7,))


@pytest.fixture
def batches(stepper: Stepper, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sessions in each step that the engine has run."""
    sizes: list[int] = []
    schedule = stepper.scheduler.schedule

    def watched(*args, **kwargs):
        output = schedule(*args, **kwargs)
        if output.num_scheduled_tokens:
            sizes.append(len(output.num_scheduled_tokens))
        return output

    monkeypatch.setattr(stepper.scheduler, "schedule", watched)
    return sizes


def test_batches_shrink_to_one_for_each_way_of_sampling(stepper: Stepper, batches: list[int]):
    assert SETTINGS.max_sessions == 24
    other = replace(WITH_TOP_P, top_k=10)
    same_but_its_stop = replace(WITH_TOP_P, stop_token_ids=(8, 9))
    warm_up(stepper.core, [WITH_TOP_P, other, same_but_its_stop])
    assert batches == [24, 16, 8, 4, 2, 1] * 2
    stepper.check_empty()


def test_it_stays_within_what_the_pool_holds(stepper: Stepper, batches: list[int]):
    limits = stepper.core.limits
    stepper.core.limits = replace(limits, num_kv_blocks=6 * limits.blocks_per_session)
    try:
        warm_up(stepper.core, [Sampling()])
    finally:
        stepper.core.limits = limits
    assert batches == [6, 4, 2, 1]


def test_an_engine_that_refuses_is_told(stepper: Stepper):
    with pytest.raises(EngineError, match=r"warm-up of 24 sessions .*temperature"):
        warm_up(stepper.core, [Sampling(temperature=-1.0)])
