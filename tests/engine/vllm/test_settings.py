"""Options that cannot work are refused by name, before anything is loaded."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.models.family import EngineRecipe
from engine.vllm.compaction.options import CompactionOptions
from engine.vllm.settings import VllmSettings, engine_arguments, max_model_len
from engine.vllm.sink_window.options import SinkWindowOptions

RECIPE = EngineRecipe(model_dir=Path("/model"), max_session_tokens=2048)


@pytest.mark.parametrize(
    "options,message",
    [
        (dict(device="tpu"), "device='tpu': must be 'cpu' or 'cuda'"),
        (dict(max_sessions=0), "max_sessions=0: must be from 1 to 65536"),
        (dict(max_session_tokens=3), "max_session_tokens=3: must be from 16"),
        (dict(max_batch_tokens=0), "max_batch_tokens=0: must be from 16"),
        (dict(kv_cache_bytes=0), "kv_cache_bytes=0: must be from 1"),
        (dict(kv_cache_bytes=None), "kv_cache_bytes: must be set on the CPU"),
        (dict(block_size_tokens=24), "block_size_tokens=24: must be a multiple of 16"),
        (dict(gpu_memory_utilization=1.5), r"gpu_memory_utilization=1.5: must be in \(0, 1\]"),
        (dict(dtype="int8"), "dtype='int8': must be one of bfloat16, float16, float32"),
        (dict(kv="some"), "kv='some': must be 'windowed' or 'unbounded'"),
        (dict(window_tokens=0), "window_tokens=0: must be from 1"),
        (dict(max_sink_tokens=-1), "max_sink_tokens=-1: must be from 0"),
        (dict(max_chunk_tokens=15), "max_chunk_tokens=15: must be from 16"),
        (dict(compaction_slack_tokens=63), r"compaction_slack_tokens=63: must be 0 \(never\) or at least 64"),
    ],
)
def test_an_error_names_the_option_and_its_range(options, message):
    with pytest.raises(ValueError, match=message):
        VllmSettings(**(dict(kv_cache_bytes=1 << 20) | options))


def test_cuda_sizes_its_pool_by_the_gpu_and_uses_small_blocks():
    settings = VllmSettings(device="cuda", block_size_tokens=16)
    assert settings.is_async
    arguments = engine_arguments(RECIPE, settings, object)
    assert arguments["kv_cache_memory_bytes"] is None
    assert arguments["enforce_eager"] is False


@pytest.mark.parametrize("cap,expected", [(None, 2048), (4096, 2048), (2048, 2048), (2047, 2048), (500, 501)])
def test_the_length_leaves_room_for_the_last_sampled_token(cap, expected):
    settings = VllmSettings(kv_cache_bytes=1 << 20, max_session_tokens=cap)
    assert max_model_len(RECIPE, settings) == expected


@pytest.mark.parametrize(
    "changes,length,cap",
    [
        (dict(), 2320, None),  # 256 + 511 + 1023 + 15 parked, a turn of 512, one sampled; whole blocks
        (dict(compaction_slack_tokens=256, max_sink_tokens=64), 1616, None),
        (dict(max_session_tokens=100_000), 2320, 100_000),
        (dict(compaction_slack_tokens=0), 8192, "off"),
        (dict(window_tokens=8192), 8192, "off"),  # the model was not trained for so many positions
        (dict(max_session_tokens=1000), 1001, "off"),  # the cap comes first
        (dict(kv="unbounded"), 8192, "off"),
    ],
)
def test_compacted_sessions_need_no_more_positions_than_they_hold(changes, length, cap):
    recipe = EngineRecipe(model_dir=Path("/model"), max_session_tokens=8192)
    settings = VllmSettings(kv_cache_bytes=1 << 20, **changes)
    assert max_model_len(recipe, settings) == length
    arguments = engine_arguments(recipe, settings, object)
    config = SimpleNamespace(additional_config=arguments.get("additional_config", {}))
    found = CompactionOptions.of(config)
    assert found == (None if cap == "off" else CompactionOptions(settings.compaction_slack_tokens, cap))


def test_the_recipe_has_the_last_word():
    recipe = EngineRecipe(
        Path("/m"), 2048, modality="audio", overrides={"trust_remote_code": True, "seed": 9}
    )
    arguments = engine_arguments(recipe, VllmSettings(kv_cache_bytes=1 << 20), object)
    assert arguments["limit_mm_per_prompt"] == {"audio": 1, "image": 0, "video": 0}
    assert arguments["mm_processor_cache_gb"] == 0
    assert arguments["trust_remote_code"] is True
    assert arguments["seed"] == 9


def test_the_sizes_of_the_window_travel_in_vllms_configuration():
    settings = VllmSettings(
        kv_cache_bytes=1 << 20, window_tokens=100, max_sink_tokens=20, max_chunk_tokens=50
    )
    arguments = engine_arguments(RECIPE, settings, object)
    config = SimpleNamespace(additional_config=arguments["additional_config"])
    assert SinkWindowOptions.of(config) == settings.sink_window == SinkWindowOptions(100, 20, 50)
    assert arguments["long_prefill_token_threshold"] == 50
    assert arguments["block_size"] == 16
    assert "attention_config" not in arguments  # the CPU platform knows one backend only, which we replace


def test_on_cuda_only_plain_full_attention_gets_our_backend():
    arguments = engine_arguments(RECIPE, VllmSettings(device="cuda"), object)
    assert arguments["attention_config"] == {"backend_per_kind": {"full_attention": "CUSTOM"}}


def test_steps_with_chunks_have_graphs_too():
    arguments = engine_arguments(RECIPE, VllmSettings(device="cuda", max_batch_tokens=8192), object)
    assert arguments["compilation_config"]["cudagraph_mode"] == "FULL"  # attention included
    sizes = arguments["compilation_config"]["cudagraph_capture_sizes"]
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == 2048
    assert max(b - a for a, b in pairwise(sizes)) == 64  # what padding may cost
    small = engine_arguments(RECIPE, VllmSettings(device="cuda", max_batch_tokens=100), object)
    assert small["compilation_config"]["cudagraph_capture_sizes"][-1] <= 100
    eager = engine_arguments(RECIPE, VllmSettings(device="cuda", eager=True), object)
    assert "compilation_config" not in eager


def test_unbounded_is_vllm_as_it_comes():
    arguments = engine_arguments(RECIPE, VllmSettings(device="cuda", kv="unbounded"), object)
    assert "cudagraph_mode" not in arguments["compilation_config"]
    ours = {"additional_config", "worker_cls", "attention_config", "long_prefill_token_threshold"}
    assert not ours & set(arguments)
    assert arguments["block_size"] is None


def test_fp8_is_one_option_each_for_weights_and_kv():
    usual = engine_arguments(RECIPE, VllmSettings(device="cuda"), object)
    assert not {"quantization", "kv_cache_dtype"} & set(usual)
    weights = engine_arguments(RECIPE, VllmSettings(device="cuda", weights="fp8"), object)
    assert weights["quantization"] == "fp8" and "kv_cache_dtype" not in weights
    kv = engine_arguments(RECIPE, VllmSettings(device="cuda", kv_dtype="fp8"), object)
    assert kv["kv_cache_dtype"] == "fp8" and "quantization" not in kv


@pytest.mark.parametrize("name", ["weights", "kv_dtype"])
def test_fp8_needs_a_gpu(name):
    fp8: Any = {name: "fp8"}
    other: Any = {name: "int4"}
    with pytest.raises(ValueError, match=f"{name}='fp8' needs a GPU"):
        VllmSettings(kv_cache_bytes=1 << 30, **fp8)
    with pytest.raises(ValueError, match=f"{name}='int4'"):
        VllmSettings(device="cuda", **other)
