"""Moves cached keys to earlier positions, on the worker: our kernel on CUDA, vectorised torch on the CPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.engine import EngineError
from engine.vllm.compaction.rotation import UnmovableKeys, rotations
from engine.vllm.sink_window.spec import SinkWindowSpec
from kernels.rebase import KeyCaches, Rotation, plan_moves, rebase_keys


class _Kind(NamedTuple):
    """Layers alike in this are moved together."""

    group: int
    rotation: Rotation  # compared by identity
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class KeyMover:
    """Built once, when the model is loaded and its KV caches are bound; see `move`.

    Raises UnmovableKeys where the model's keys cannot be moved, in one sentence why.
    """

    def __init__(self, runner: Any) -> None:
        """`runner` is vLLM's model runner, V1's on the CPU or V2's on CUDA, whose KV caches are bound."""
        self._device: torch.device = runner.device
        self._num_blocks: int = runner.kv_cache_config.num_blocks
        context = runner.compilation_config.static_forward_context
        groups = _layer_groups(runner.kv_cache_config)
        turns = rotations(runner.get_model(), {name: context[name] for name in groups})
        kinds: dict[_Kind, list[Any]] = defaultdict(list)
        for name, group in groups.items():
            cache = context[name].kv_cache
            if cache.shape[0] != self._num_blocks:
                raise EngineError(f"{name} has {cache.shape[0]} blocks, the scheduler {self._num_blocks}")
            kind = _Kind(group, turns[name], tuple(cache.shape), cache.stride(), cache.dtype)
            kinds[kind].append(context[name])
        on_device = _CudaKeys if self._device.type == "cuda" else _cpu_keys
        self._by_group: dict[int, list[Any]] = {index: [] for index in groups.values()}
        for kind, layers in kinds.items():
            keys = on_device(layers, kind.rotation)
            keys.move(np.array([0]), np.array([1]))  # compiles the kernel, on vLLM's null block
            self._by_group[kind.group].append(keys)

    def move(self, moves: Sequence[tuple[Sequence[int] | np.ndarray, int]], group: int = 0) -> None:
        """Turn blocks of keys back in place, in every layer of a KV cache group.

        A move is one session's (block ids, distance in tokens): whole blocks, the last may be partly filled.
        What lies behind a session's last token may be anything and stays harmless; no other block is touched.
        Call it between two forward passes, on the thread and stream that run them: on CUDA the host waits
        for nothing. Raises ValueError for blocks outside the cache, block 0 (vLLM's null block), and a block
        named twice: faults of ours, not of a client's.
        """
        moves = [(block_ids, distance) for block_ids, distance in moves if distance and len(block_ids)]
        if not moves:
            return
        ids = np.concatenate([np.asarray(block_ids, dtype=np.int64) for block_ids, _ in moves])
        counts = [len(block_ids) for block_ids, _ in moves]
        distances = np.repeat(np.array([distance for _, distance in moves], dtype=np.int64), counts)
        if not ids.all():
            raise ValueError("block 0 is vLLM's own and cannot be moved")
        for keys in self._by_group[group]:
            keys.move(ids, distances)


class _CudaKeys:
    """Layers alike, in vLLM's CUDA layout: [num_blocks, num_kv_heads, block_size, 2 * head_size]."""

    def __init__(self, layers: Sequence[Any], rotation: Rotation) -> None:
        self._rotation = rotation
        self._caches = KeyCaches.of(
            [_typed(layer).transpose(1, 2)[..., : layer.head_size] for layer in layers]
        )

    def move(self, block_ids: np.ndarray, distances: np.ndarray) -> None:
        keys = self._caches.layers[0]
        moves = plan_moves(block_ids, distances, self._rotation, len(keys), keys.device)
        rebase_keys(self._caches, moves, self._rotation)


def _cpu_keys(layers: Sequence[Any], rotation: Rotation) -> Any:
    # Here: it needs operators that only vLLM for the CPU has.
    from engine.vllm.compaction.key_layout import PackedKeys, learn_order, split_keys

    first = layers[0]
    caches = [_typed(layer) for layer in layers]
    _, num_kv_heads, block_size, _ = caches[0].shape
    order = learn_order(num_kv_heads, block_size, first.head_size, first.dtype, caches[0].dtype, first.isa)
    keys = [split_keys(cache, block_size, first.head_size) for cache in caches]
    return PackedKeys(keys, order, rotation, first.head_size)


def _typed(layer: Any) -> torch.Tensor:
    """A layer's cache as the numbers it holds: vLLM keeps fp8 as bytes."""
    if layer.kv_cache_dtype in ("fp8", "fp8_e4m3"):
        return layer.kv_cache.view(torch.float8_e4m3fn)
    if not layer.kv_cache.dtype.is_floating_point:
        raise UnmovableKeys(f"keys cached as {layer.kv_cache_dtype} cannot be turned")
    return layer.kv_cache


def _layer_groups(kv_cache_config: Any) -> dict[str, int]:
    """KV cache group of every layer. All must be windowed by us: others' keys would stay where they are."""
    groups = {}
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        for name in group.layer_names:
            spec = group.kv_cache_spec if specs is None else specs[name]
            if not isinstance(spec, SinkWindowSpec):
                raise UnmovableKeys(
                    f"{name} keeps a cache of its own kind ({type(spec).__name__}), which would stay at the "
                    "old positions"
                )
            groups[name] = index
    return groups
