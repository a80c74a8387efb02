"""Keys packed by vLLM's CPU kernel, turned in place, against plain keys turned by the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.rebase import Rotation, rebase_keys_reference

pytestmark = pytest.mark.vllm

NUM_BLOCKS, HEADS, LAYERS = 7, 3, 2


def write(key: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, isa: str) -> None:
    """As vLLM's CPU backend does: key [tokens, heads, size] into cache [blocks, heads, slots, 2 * size]."""
    from vllm import _custom_ops as ops

    blocks, heads, slots_per_block, double = cache.shape
    keys, values = cache.view(blocks, heads, 2 * slots_per_block, double // 2).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, torch.ones_like(key), keys, values, slots, isa)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def isa_for(dtype: torch.dtype, block_size: int, head_size: int) -> str:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    return _get_attn_isa(dtype, block_size, head_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "block_size, head_size", [(16, 64), (32, 64), (128, 64), (16, 80), (16, 128), (48, 32)]
)
def test_the_order_is_learnt(dtype: torch.dtype, block_size: int, head_size: int) -> None:
    from engine.vllm.compaction.key_layout import learn_order, split_keys

    isa = isa_for(dtype, block_size, head_size)
    order = learn_order(HEADS, block_size, head_size, dtype, dtype, isa)
    cache = torch.zeros((2, HEADS, block_size, 2 * head_size), dtype=dtype)
    key = torch.randn(block_size, HEADS, head_size).to(dtype)
    write(key, cache, torch.arange(block_size), isa)
    packed = split_keys(cache, block_size, head_size)[0]
    assert torch.equal(packed, key.transpose(0, 1).reshape(HEADS, -1)[:, order])


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="vLLM's fp8 cache needs AVX-512")
@pytest.mark.parametrize("block_size", [32, 64])
def test_an_fp8_caches_order_is_that_of_its_instructions_too(block_size: int) -> None:
    from engine.vllm.compaction.key_layout import learn_order

    isa = isa_for(torch.bfloat16, block_size, 64)
    order = learn_order(HEADS, block_size, 64, torch.bfloat16, torch.float8_e4m3fn, isa)
    assert torch.equal(order, learn_order(HEADS, block_size, 64, torch.bfloat16, torch.bfloat16, isa))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("rotary_dim, is_neox", [(64, True), (64, False), (16, True), (48, False)])
def test_packed_keys_turn_as_plain_ones(
    dtype: torch.dtype, block_size: int, rotary_dim: int, is_neox: bool
) -> None:
    """And nothing else changes: values, other blocks (NaN here), the bits of dimensions that do not turn."""
    from engine.vllm.compaction.key_layout import PackedKeys, learn_order, split_keys

    head_size, generator = 64, torch.Generator().manual_seed(3)
    frequencies = 10_000.0 ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    rotation, isa = Rotation(frequencies, is_neox), isa_for(dtype, block_size, head_size)
    order = learn_order(HEADS, block_size, head_size, dtype, dtype, isa)
    block_ids, distances = [5, 1, 4, 2], [16, 4096, 16, 999_983]
    caches, plain = [], []
    for _ in range(LAYERS):
        cache = torch.full((NUM_BLOCKS, HEADS, block_size, 2 * head_size), float("nan"), dtype=dtype)
        keys = torch.full((NUM_BLOCKS, block_size, HEADS, head_size), float("nan"), dtype=dtype)
        for block in block_ids:
            filled = block_size if block != 4 else block_size // 2  # the rest of block 4 stays NaN
            key = torch.randn((filled, HEADS, head_size), generator=generator).to(dtype)
            write(key, cache, torch.arange(filled) + block * block_size, isa)
            keys[block, :filled] = key
        caches.append(cache)
        plain.append(keys)
    before = [cache.clone() for cache in caches]
    packed = [split_keys(cache, block_size, head_size) for cache in caches]
    PackedKeys(packed, order, rotation, head_size).move(np.array(block_ids), np.array(distances))
    rebase_keys_reference(plain, block_ids, distances, rotation)
    others = [block for block in range(NUM_BLOCKS) if block not in block_ids]
    for cache, old, keys in zip(caches, before, plain, strict=True):
        expected = keys.transpose(1, 2).reshape(NUM_BLOCKS, HEADS, -1)[..., order]
        torch.testing.assert_close(
            split_keys(cache, block_size, head_size), expected, rtol=0, atol=0, equal_nan=True
        )
        size = block_size * head_size
        assert torch.equal(bits(cache[others]), bits(old[others]))
        assert torch.equal(bits(cache.flatten(2)[..., size:]), bits(old.flatten(2)[..., size:]))


def test_another_layout_is_refused() -> None:
    from engine.engine import EngineError
    from engine.vllm.compaction.key_layout import split_keys

    with pytest.raises(EngineError, match="not vLLM's CPU layout"):
        split_keys(torch.zeros(4, 16, 2, 128), 16, 64)
