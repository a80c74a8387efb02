"""The table at an engine's start, and the refusal of a pool that serves nobody."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import pytest
from safetensors import safe_open

from engine.engine import EngineError
from engine.vllm.footprint import Footprint, explained, report, size
from tests.engine.vllm.stepper import SETTINGS

pytestmark = pytest.mark.vllm


def test_the_table_counts_what_the_engine_holds(engine_core, model_dir, caplog):
    footprint = Footprint.of(engine_core)
    token_bytes = 2 * 2 * 32 * 4  # 2 layers, key and value, one KV head of 32, float32
    assert footprint.session_kv == footprint.session_tokens * token_bytes
    assert footprint.pool <= (SETTINGS.kv_cache_bytes or 0)
    assert footprint.num_sessions == (footprint.pool // token_bytes // 32 - 1) // (
        footprint.session_tokens // 32
    )
    assert footprint.num_slots == SETTINGS.max_sessions
    with safe_open(model_dir / "model.safetensors", "pt") as file:
        stored = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
    assert footprint.weights == pytest.approx(4 * stored, rel=0.02)  # float32; packed ones count as others
    with caplog.at_level(logging.INFO):
        report(engine_core, model_dir)
    assert f"{model_dir}, memory on its device" in caplog.text
    for name in ("weights", "KV of a session", "KV pool", "encoder cache"):
        assert name in caplog.text


def test_a_pool_that_holds_no_session_is_refused_in_plain_words(engine_core):
    footprint = replace(Footprint.of(engine_core), num_sessions=0, session_kv=3 << 30, pool=2 << 30)
    with pytest.raises(
        EngineError, match=r"KV cache of 2\.0 GiB cannot hold one session, which takes up to 3\.0"
    ):
        footprint.check()


def test_vllms_own_refusals_become_ours():
    known = explained(ValueError("No available memory for the cache blocks. Try increasing ..."))
    assert known is not None and "--engine-kv-dtype fp8" in str(known)
    assert explained(ValueError("something else")) is None


def test_sizes():
    assert (size(86 << 20), size(3 << 29)) == ("86.0 MiB", "1.5 GiB")
