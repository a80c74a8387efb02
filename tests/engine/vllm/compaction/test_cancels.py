"""Cancels at random moments on an engine that does not compact, sync and async: every count is right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.vllm.compaction.on_device_cancels import Cancels
from tests.engine.vllm.compaction.on_device_engine import CHUNK, SINKS
from tests.support.ultravox_checkpoint import AUDIO_TOKEN_ID

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def engine_core(family) -> Iterator:
    from engine.vllm.loading import load
    from tests.engine.vllm.sink_window.windowed import settings

    core = load(
        family.engine_recipe(),
        settings(
            max_sink_tokens=SINKS, max_chunk_tokens=CHUNK, compaction_slack_tokens=0, kv_cache_bytes=4 << 20
        ),
    )
    yield core
    core.shutdown()


@pytest.mark.parametrize("seed", range(2))
def test_cancels_past_the_window(stepper, seed: int):
    assert stepper.core.limits.max_session_tokens == 1000
    game = Cancels(stepper.core, seed, AUDIO_TOKEN_ID, longest=500)
    game.run(60)
    assert game.counts["cancelled before its answer"] and game.counts["cancelled while it answered"]
    for name in game.sessions:
        stepper.core.end(name, 0)
    stepper.run_idle()
