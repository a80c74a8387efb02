"""Keys in vLLM's CPU cache, where a kernel packs them as its instructions like to read them.

How, depends on the processor and the block size (vec16: [head_size][block_size]; AMX: pairs). The order is
learnt at start, by writing numbers that say where they belong and looking where they went. It is the same in
every block and head, so a key is turned in place: each element meets its partner's, wherever that lies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from vllm import _custom_ops as ops

from engine.engine import EngineError
from kernels.rebase import Rotation, check_moves, turn_table
from kernels.rebase.reference import rounded

_BASE = 8  # digits that every dtype holds exactly, fp8 (e4m3) too
_BLOCKS_AT_ONCE = 256  # bounds the float32 copies


def split_keys(kv_cache: torch.Tensor, block_size: int, head_size: int) -> torch.Tensor:
    """A layer's packed keys, [num_blocks, num_kv_heads, block_size * head_size], a view of its cache.

    vLLM binds the cache as [num_blocks, num_kv_heads, block_size, 2 * head_size]; its kernel takes the same
    memory as a block's keys and then its values.
    """
    num_blocks, num_heads = kv_cache.shape[:2]
    if tuple(kv_cache.shape[2:]) != (block_size, 2 * head_size):
        raise EngineError(f"a KV cache of shape {tuple(kv_cache.shape)} is not vLLM's CPU layout")
    flat = kv_cache.view(num_blocks, num_heads, 2 * block_size * head_size)
    return flat[:, :, : block_size * head_size]


def learn_order(
    num_kv_heads: int, block_size: int, head_size: int, dtype: torch.dtype, cache_dtype: torch.dtype, isa: str
) -> torch.Tensor:
    """For every element of a packed block, its place in the plain [block_size, head_size]: int64.

    `dtype` is the model's, `cache_dtype` the cache's, `isa` vLLM's name of the packing. Raises EngineError
    where what is written is no permutation, or not the same in every head.
    """
    size = block_size * head_size
    plain = torch.arange(size)
    order = torch.zeros((num_kv_heads, size), dtype=torch.int64)
    digit = 1
    while digit < size:
        key = (plain // digit % _BASE).view(block_size, 1, head_size).expand(-1, num_kv_heads, -1)
        cache = torch.zeros((2, num_kv_heads, block_size, 2 * head_size), dtype=cache_dtype)
        halves = cache.view(2, num_kv_heads, 2 * block_size, head_size)
        if cache_dtype != dtype:
            halves = halves.view(torch.uint8)  # vLLM's operator takes fp8 as bytes
        key_cache, value_cache = halves.chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            key.to(dtype).contiguous(),
            torch.zeros(key.shape, dtype=dtype),
            key_cache,
            value_cache,
            torch.arange(block_size) + block_size,  # into the second block
            isa,
            kv_cache_dtype="auto" if cache_dtype == dtype else "fp8_e4m3",
        )
        found = split_keys(cache, block_size, head_size).to(torch.float32)
        if found[0].any():
            raise EngineError(f"vLLM's CPU kernel ({isa}) writes keys outside of their block")
        order += found[1].long() * digit
        digit *= _BASE
    if not torch.equal(order[0].sort().values, plain) or not (order == order[0]).all():
        raise EngineError(f"vLLM's CPU kernel ({isa}) does not keep keys as a permutation of a block")
    return order[0]


class PackedKeys:
    """The packed keys of layers that are alike, and the turn of whole blocks of them."""

    def __init__(
        self, layers: Sequence[torch.Tensor], order: torch.Tensor, rotation: Rotation, head_size: int
    ):
        """`layers` from `split_keys`, `order` from `learn_order`."""
        self._layers = layers
        self._rotation = rotation
        slot, dim = order // head_size, order % head_size
        half, rotary_dim = rotation.rotary_dim // 2, rotation.rotary_dim
        if rotation.is_neox:
            partner, pair, sign = (dim + half) % max(1, rotary_dim), dim % max(1, half), dim < half
        else:
            partner, pair, sign = dim ^ 1, dim // 2, dim % 2 == 0
        turned = dim < rotary_dim
        partner = torch.where(turned, partner, dim)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        where = place[slot * head_size + partner]  # the other of each element's pair
        self._run = _run_length(where)
        self._partner = where[:: self._run] // self._run  # of each run of neighbours, so that copies are long
        self._pair = pair.clamp(max=half - 1).numpy()
        self._sign = torch.where(turned, torch.where(sign, 1.0, -1.0), 0.0).numpy().astype(np.float32)
        self._turned = turned.numpy()

    def move(self, block_ids: np.ndarray, distances: np.ndarray) -> None:
        """Turn blocks back in place in every layer, each by its own distance (tokens), in float32.

        int64 [num_moved] both. Raises what `check_moves` raises.
        """
        check_moves(block_ids, distances, len(self._layers[0]))
        different, turn_ids = np.unique(distances, return_inverse=True)
        cos, sin = np.split(turn_table(different, self._rotation), 2, axis=1)
        own = torch.from_numpy(np.where(self._turned, cos[:, self._pair], np.float32(1.0)))
        other = torch.from_numpy(sin[:, self._pair] * self._sign)
        for start in range(0, len(block_ids), _BLOCKS_AT_ONCE):
            ids = torch.from_numpy(block_ids[start : start + _BLOCKS_AT_ONCE])
            turn = torch.from_numpy(turn_ids[start : start + _BLOCKS_AT_ONCE])
            mine, theirs = own[turn][:, None], other[turn][:, None]
            for keys in self._layers:
                old = keys[ids].float()
                partner = old.unflatten(-1, (-1, self._run)).index_select(-2, self._partner).flatten(-2)
                new = old.mul_(mine).add_(partner.mul_(theirs))
                keys[ids] = rounded(new, keys.dtype)


def _run_length(index: torch.Tensor) -> int:
    """The largest power of two of which aligned runs of the index go to aligned runs, in order."""
    run = len(index) & -len(index)
    while True:
        runs = index.view(-1, run)
        if (runs == runs[:, :1] + torch.arange(run)).all() and not (runs[:, 0] % run).any():
            return run
        run //= 2
