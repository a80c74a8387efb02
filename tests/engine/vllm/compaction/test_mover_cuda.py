"""The mover on vLLM's CUDA layout: on a GPU, or where there is none in Triton's interpreter.

In the whole engine: bench/moved_keys_gpu.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kernels.rebase import Rotation, rebase_keys_reference

pytestmark = pytest.mark.vllm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_BLOCKS, HEADS, SLOTS, SIZE = 6, 2, 16, 64


@pytest.fixture(scope="module", autouse=True)
def interpreted() -> None:
    if DEVICE == "cuda":
        return
    import triton.language as tl
    from triton_interpreter import interpret  # pyright: ignore[reportMissingImports]

    interpret(tl, tl.standard, importlib.import_module("kernels.rebase.kernel"))


@pytest.fixture(autouse=True)
def config() -> Iterator[None]:
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield


def rope(theta: float) -> nn.Module:
    from vllm.model_executor.layers.rotary_embedding import get_rope

    return get_rope(SIZE, 4096, True, {"rope_theta": theta}, torch.bfloat16).to(DEVICE)


class Attention(nn.Module):
    """As much of vLLM's as the mover looks at; the cache as V2's runner binds it."""

    def __init__(self, cache: torch.Tensor, kv_cache_dtype: str = "auto") -> None:
        super().__init__()
        self.impl: Any = SimpleNamespace(alibi_slopes=None)
        self.kv_cache, self.kv_cache_dtype, self.head_size = cache, kv_cache_dtype, SIZE


def runner(thetas: list[float], *, dtype: torch.dtype = torch.bfloat16, nhd: bool = True) -> Any:
    """A runner of one layer per theta. Keys are numbers, everything that must not be touched NaN."""
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    from engine.vllm.sink_window.spec import SinkWindowSpec

    spec = SinkWindowSpec(
        block_size=SLOTS,
        num_kv_heads=HEADS,
        head_size=SIZE,
        dtype=torch.bfloat16,
        window_tokens=64,
        max_sink_tokens=16,
        in_flight_tokens=16,
        max_session_tokens=512,
    )
    generator, layers, blocks = torch.Generator().manual_seed(0), {}, []
    shape = (NUM_BLOCKS, SLOTS, HEADS, 2 * SIZE) if nhd else (NUM_BLOCKS, HEADS, SLOTS, 2 * SIZE)
    for index, theta in enumerate(thetas):
        cache = torch.randn(shape, generator=generator).to(DEVICE, dtype)
        cache = cache.view(torch.uint8) if dtype == torch.float8_e4m3fn else cache
        cache = cache.transpose(1, 2) if nhd else cache
        layer = Attention(cache, "fp8" if dtype == torch.float8_e4m3fn else "auto")
        block = nn.Module()
        block.attn, block.rotary_emb = layer, rope(theta)
        blocks.append(block)
        layers[f"layers.{index}.attn"] = layer
    model = nn.ModuleList(blocks)
    return SimpleNamespace(
        device=torch.device("cuda"),  # also where the kernel is interpreted: it shall take CUDA's way
        kv_cache_config=KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(list(layers), spec)]),
        compilation_config=SimpleNamespace(static_forward_context=layers),
        get_model=lambda: model,
    )


def keys(runner: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    layers = runner.compilation_config.static_forward_context.values()
    return [layer.kv_cache.view(dtype).transpose(1, 2)[..., :SIZE] for layer in layers]


@pytest.mark.parametrize("nhd", [True, False], ids=["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("thetas", [[1e4, 1e4, 1e4], [1e4, 1e6, 1e4]], ids=["alike", "two kinds of layer"])
def test_all_layers_turn_by_their_own_rotation(thetas: list[float], dtype: torch.dtype, nhd: bool) -> None:
    from engine.vllm.compaction.mover import KeyMover

    fake = runner(thetas, dtype=dtype, nhd=nhd)
    mover, caches = KeyMover(fake), keys(fake, dtype)
    layers = fake.compilation_config.static_forward_context.values()
    before = [layer.kv_cache.clone() for layer in layers]
    expected = [cache.clone() for cache in caches]
    mover.move([([4, 2], 256), ([5], 48)])
    for layer, old, theta, found, want in zip(layers, before, thetas, caches, expected, strict=True):
        rotation = Rotation(theta ** -(torch.arange(0, SIZE, 2, dtype=torch.float64) / SIZE), True)
        rebase_keys_reference([want], [4, 2, 5], [256, 256, 48], rotation)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(found.float(), want.float(), atol=eps / 8, rtol=eps)
        assert (found.float() != want.float()).float().mean() < 0.01
        others = [block for block in range(1, NUM_BLOCKS) if block not in (4, 2, 5)]
        # Compared as bytes: fp8 cannot be indexed everywhere.
        new, old = layer.kv_cache.view(torch.uint8), old.view(torch.uint8)
        assert torch.equal(new[others], old[others])
        values = SIZE * dtype.itemsize
        assert torch.equal(new[..., values:], old[..., values:])


def test_layers_that_keep_another_cache_are_refused() -> None:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    from engine.vllm.compaction.mover import KeyMover
    from engine.vllm.compaction.rotation import UnmovableKeys

    fake = runner([1e4, 1e4])
    (group,) = fake.kv_cache_config.kv_cache_groups
    sliding = SlidingWindowSpec(
        block_size=SLOTS, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.bfloat16, sliding_window=32
    )
    groups = [KVCacheGroupSpec(group.layer_names[:1], group.kv_cache_spec)]
    groups.append(KVCacheGroupSpec(group.layer_names[1:], sliding))
    fake.kv_cache_config = KVCacheConfig(NUM_BLOCKS, [], groups)
    with pytest.raises(UnmovableKeys, match=r"layers\.1\.attn keeps a cache of its own kind"):
        KeyMover(fake)


def test_a_cache_of_packed_numbers_is_refused() -> None:
    from engine.vllm.compaction.mover import KeyMover
    from engine.vllm.compaction.rotation import UnmovableKeys

    fake = runner([1e4], dtype=torch.float8_e4m3fn)
    (layer,) = fake.compilation_config.static_forward_context.values()
    layer.kv_cache_dtype = "nvfp4"
    with pytest.raises(UnmovableKeys, match="cached as nvfp4"):
        KeyMover(fake)


def test_moves_of_numpy_arrays_are_taken_too() -> None:
    from engine.vllm.compaction.mover import KeyMover

    one, other = runner([1e4]), runner([1e4])
    KeyMover(one).move([(np.array([3, 1]), 32)])
    KeyMover(other).move([((3,), 32), ((1,), 32)])
    assert torch.equal(*(keys(fake, torch.bfloat16)[0] for fake in (one, other)))
