"""What cannot work fails at the start and says what to change; what is left alone is said once."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.engine import EngineError
from engine.vllm.sink_window.options import SinkWindowOptions
from tests.engine.vllm.sink_window.windowed import settings

pytestmark = pytest.mark.vllm

OPTIONS = SinkWindowOptions(window_tokens=100, max_sink_tokens=20, max_chunk_tokens=50)


def config(**changes: Any) -> Any:
    usual = dict(
        additional_config=OPTIONS.as_additional_config(),
        parallel_config=SimpleNamespace(world_size=1),
        model_config=SimpleNamespace(use_mla=False, max_model_len=1000),
        cache_config=SimpleNamespace(enable_prefix_caching=False),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
        max_concurrent_batches=2,
        speculative_config=None,
    )
    return SimpleNamespace(**(usual | changes))


@pytest.mark.parametrize(
    "changes,message",
    [
        (
            dict(parallel_config=SimpleNamespace(world_size=2)),
            "runs on one device, and 2 .* use one, or keep",
        ),
        (
            dict(cache_config=SimpleNamespace(enable_prefix_caching=True)),
            "prefix caching .* switch the latter off",
        ),
        (dict(speculative_config=object()), "speculative decoding exclude each other: use one"),
        (
            dict(model_config=SimpleNamespace(use_mla=True)),
            "latent attention .* choose another model, or keep",
        ),
    ],
)
def test_configurations_that_cannot_be_windowed(changes, message):
    from engine.vllm.sink_window.starting import check

    with pytest.raises(EngineError, match=message):
        check(config(**changes))
    check(config(**(changes | {"additional_config": {}})))  # unbounded
    check(config())


def test_a_real_engine_refuses_prefix_caching_before_it_loads(family):
    from engine.vllm.loading import load

    recipe = replace(family.engine_recipe(), overrides={"enable_prefix_caching": True})
    with pytest.raises(EngineError, match="prefix caching exclude each other"):
        load(recipe, settings())


def test_a_pool_too_small_for_one_windowed_session_is_told_with_what_it_takes(family):
    from engine.vllm.loading import load

    with pytest.raises(EngineError, match="kv_cache_bytes=40000 cannot hold one session"):
        load(family.engine_recipe(), settings(kv_cache_bytes=40_000))


def groups(*specs: Any) -> Any:
    return SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(layer_names=["a", "b"], kv_cache_spec=spec) for spec in specs]
    )


def specs() -> tuple[Any, Any]:
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    from engine.vllm.sink_window.spec import SinkWindowSpec

    size: dict[str, Any] = dict(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    own: dict[str, Any] = dict(
        window_tokens=100, max_sink_tokens=20, in_flight_tokens=100, max_session_tokens=1000
    )
    return SinkWindowSpec(**size, **own), SlidingWindowSpec(**size, sliding_window=100)


def test_layers_left_alone_are_told_in_one_line(caplog):
    from engine.vllm.sink_window.starting import report

    ours, sliding = specs()
    with caplog.at_level(logging.INFO):
        report(config(), groups(ours, sliding))
    (line,) = caplog.messages
    kept = "2 attention layers keep the last 100 tokens and up to 20 first ones"
    assert line == f"{kept}; left alone: 2 x SlidingWindowSpec"
    with pytest.raises(
        EngineError, match=r"no layer of this model .* choose another model, or keep everything"
    ):
        report(config(), groups(sliding))
    report(config(additional_config={}), groups(sliding))


def test_only_plain_full_attention_is_windowed():
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    from engine.vllm.sink_window.spec import is_plain_full_attention

    size: dict[str, Any] = dict(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    plain = FullAttentionSpec(**size)
    others = [
        replace(plain, sliding_window=100),
        replace(plain, attention_chunk_size=100),
        replace(plain, non_causal=True),
        MLAAttentionSpec(**size),
        *specs(),
    ]
    assert is_plain_full_attention(plain)
    assert not any(map(is_plain_full_attention, others))


def test_a_permit_reserves_the_bound_over_all_groups():
    from engine.vllm.sink_window.spec import blocks_per_session
    from engine.vllm.sink_window.starting import max_session_blocks

    ours, _ = specs()
    bound = 2 + -(-(100 - 1 + 100 - 1) // 16) + 1
    assert ours.max_blocks == max_session_blocks(config(), 16) == bound
    assert blocks_per_session(groups(ours, ours), config()) == 2 * bound
    assert max_session_blocks(config(additional_config={}), 16) == -(-1000 // 16)
