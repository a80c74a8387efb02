"""At an engine's start: put our parts where vLLM finds them, and refuse what they cannot do."""

from __future__ import annotations

import logging
from collections import Counter

from vllm.config import VllmConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    UniformTypeKVCacheSpecs,
)

from engine.engine import EngineError
from engine.vllm.sink_window.layout import max_blocks
from engine.vllm.sink_window.options import SinkWindowOptions
from engine.vllm.sink_window.spec import SinkWindowSpec

logger = logging.getLogger(__name__)

_INSTEAD = "or keep everything with kv=unbounded"
UNFIT = f"this model's attention does not fit our kernel: choose another model or dtype, {_INSTEAD}"


def register(device: str) -> None:
    """Before the configuration is made. On the CPU our backend is in place in either mode: see cpu.py."""
    if device == "cpu":
        path = "engine.vllm.sink_window.cpu.SinkWindowCPUBackend"
        register_backend(AttentionBackendEnum.CPU_ATTN, path)
    else:
        path = "engine.vllm.sink_window.cuda.SinkWindowCUDABackend"
        register_backend(AttentionBackendEnum.CUSTOM, path)


def check(config: VllmConfig) -> None:
    """Raises EngineError, saying what to change, for what a windowed engine cannot do."""
    if SinkWindowOptions.of(config) is None:
        return
    parallel, model = config.parallel_config, config.model_config
    if parallel.world_size > 1:
        raise EngineError(
            f"sink-window attention runs on one device, and {parallel.world_size} are asked for: "
            f"use one, {_INSTEAD}"
        )
    if config.cache_config.enable_prefix_caching:
        raise EngineError(
            "sink-window attention and prefix caching exclude each other: switch the latter off"
        )
    if config.speculative_config is not None:
        raise EngineError(
            "sink-window attention and speculative decoding exclude each other: use one of them"
        )
    if model.use_mla:
        raise EngineError(f"latent attention (MLA) cannot be windowed: choose another model, {_INSTEAD}")


def max_session_blocks(config: VllmConfig, block_size: int) -> int:
    """The most blocks a session will hold of a layer with plain full attention."""
    options, max_len = SinkWindowOptions.of(config), config.model_config.max_model_len
    if options is None:
        return -(-max_len // block_size)
    return max_blocks(
        options.max_sink_tokens, options.window_tokens, options.in_flight(config), max_len, block_size
    )


def report(config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """One line on which layers are windowed. Raises EngineError where none is."""
    options = SinkWindowOptions.of(config)
    if options is None:
        return
    kinds = Counter(type(spec) for group in kv_cache_config.kv_cache_groups for spec in _layer_specs(group))
    num_windowed = kinds.pop(SinkWindowSpec, 0)
    if not num_windowed:
        raise EngineError(
            f"no layer of this model has plain full attention that could be windowed: choose another model, "
            f"{_INSTEAD}"
        )
    others = ", ".join(f"{number} x {kind.__name__}" for kind, number in kinds.items())
    logger.info(
        "%d attention layers keep the last %d tokens and up to %d first ones%s",
        num_windowed,
        options.window_tokens,
        options.max_sink_tokens,
        f"; left alone: {others}" if others else "",
    )


def _layer_specs(group: KVCacheGroupSpec) -> list[KVCacheSpec]:
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return list(spec.kv_cache_specs.values())
    return [spec] * len(group.layer_names)
