"""Works, cancels, ends and steps back at random moments, sync and async, on an engine with compaction."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.vllm.compaction.chaos import Chaos
from tests.engine.vllm.compaction.compacted import compacted
from tests.support.ultravox_checkpoint import AUDIO_TOKEN_ID

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def engine_core(family) -> Iterator:
    from engine.vllm.loading import load

    core = load(family.engine_recipe(), compacted())
    yield core
    core.shutdown()


@pytest.mark.parametrize("seed", range(3))
def test_every_count_is_right_and_nothing_is_left(stepper, seed: int):
    counts = Chaos(stepper.core, seed, num_sessions=4, vocab_size=AUDIO_TOKEN_ID).run(1200)
    expected = {"fed", "stop", "length", "cancelled", "stopped at once", "went back", "ended at work"}
    assert set(counts) >= expected, counts
