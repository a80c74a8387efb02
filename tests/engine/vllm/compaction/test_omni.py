"""Qwen-Omni's audio over many compactions: an old session computes what a young one does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.models import published
from engine.types import SAMPLE_RATE, Features, Finish, Hearing, TurnMode
from engine.vllm.settings import VllmSettings
from tests.engine.vllm.sink_window import recording
from tests.support import tiny_omni

pytestmark = pytest.mark.vllm

W, BLOCK, SLACK = 64, 16, 64
SETTINGS = VllmSettings(
    max_sessions=4,
    kv_cache_bytes=32 << 20,
    window_tokens=W,
    max_sink_tokens=16,
    max_chunk_tokens=48,
    compaction_slack_tokens=SLACK,
)


@pytest.fixture(scope="module", params=tiny_omni.NAMES)
def omni(request: pytest.FixtureRequest) -> Any:
    return published.load(str(tiny_omni.cached(request.param)))


@pytest.fixture(scope="module")
def stepper(omni) -> Iterator:
    from engine.vllm.core import SessionCore
    from engine.vllm.loading import load
    from tests.engine.vllm.stepper import Stepper

    core = load(omni.engine_recipe(), SETTINGS)
    yield Stepper(SessionCore(core, "audio"))
    core.shutdown()


def intakes(omni: Any, number: int) -> list[tuple[tuple[int, ...], tuple[Features, ...]]]:
    """A second and a bit of audio each, as the family makes it."""
    rng, ear, made = np.random.default_rng(0), omni.new_ear(), []
    while len(made) < number:
        audio = rng.normal(0, 0.1, round(1.3 * SAMPLE_RATE)).astype(np.float32)
        (intake,) = omni.hear([Hearing("a", ear, audio, False, TurnMode.MANUAL)])
        if intake.token_ids:
            made.append((intake.token_ids, intake.features))
    return made


def test_audio_over_many_compactions_is_what_a_young_session_computes(stepper, omni):
    chunks = intakes(omni, 36)
    young_from = 24
    length = sum(len(tokens) for tokens, _ in chunks[:young_from])
    tokens, features = chunks[young_from - 1]
    chunks[young_from - 1] = ((*tokens, *(100,) * (-length % BLOCK)), features)
    last = {}
    for name, start in (("old", 0), ("young", young_from)):
        for tokens, features in chunks[start:]:
            work = replace(stepper.work(name, tokens, features=features), num_head_tokens=0)
            with recording.hidden_states(stepper.core._core) as recorded:
                assert stepper.run(work) == [Finish.FED], stepper.final(work)
        last[name] = torch.cat(recorded)
    assert stepper.core._sessions["old"].num_evicted > 5 * SLACK
    torch.testing.assert_close(last["old"], last["young"], atol=1e-2, rtol=1e-3)
    assert not torch.allclose(last["old"], torch.cat([last["old"][1:], last["old"][:1]]), atol=0.1)
    for name in last:
        stepper.core.end(name, 0)
    stepper.run_idle()
    stepper.check_empty()
