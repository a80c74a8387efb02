"""The checked launcher of the key rotation: caches are described once, each set of moves is planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton

from kernels.rebase import kernel
from kernels.rebase.reference import FP8, FP8_MAX, Rotation, turn_table

DTYPES = (torch.bfloat16, torch.float16, torch.float32, FP8)
ALIGNMENT = 16  # bytes


@dataclass(frozen=True)
class Config:
    """How the work is cut; it does not enter the result."""

    rows: int = 16  # keys per program, a power of two
    num_warps: int = 4


@dataclass(frozen=True, eq=False)
class KeyCaches:
    """The keys of layers that are alike in everything but their address. It keeps the caches alive."""

    layers: tuple[torch.Tensor, ...]  # each [num_blocks, block_size, num_kv_heads, head_size]
    offsets: torch.Tensor  # int64 [num_layers] on the device: from the first layer, in units of ALIGNMENT

    @classmethod
    def of(cls, layers: Sequence[torch.Tensor]) -> KeyCaches:
        """Raises ValueError where layers differ in shape, strides, dtype or device, or are not aligned."""
        if not layers:
            raise ValueError("no layers")
        first = layers[0]
        kinds = {(layer.shape, layer.stride(), layer.dtype, layer.device) for layer in layers}
        if len(kinds) > 1:
            raise ValueError(f"layers differ in shape, strides, dtype or device: {kinds}")
        if first.dim() != 4 or first.stride(3) != 1:
            raise ValueError(
                "keys must be [num_blocks, block_size, num_kv_heads, head_size], contiguous in the last, not "
                f"{tuple(first.shape)} with strides {first.stride()}"
            )
        if first.dtype not in DTYPES:
            raise ValueError(f"keys must be one of {DTYPES}, not {first.dtype}")
        bytes_apart = [layer.data_ptr() - first.data_ptr() for layer in layers]
        if any(apart % ALIGNMENT for apart in bytes_apart):
            raise ValueError(f"layers must begin at multiples of {ALIGNMENT} bytes from each other")
        offsets = torch.tensor([apart // ALIGNMENT for apart in bytes_apart], dtype=torch.int64)
        return cls(tuple(layers), offsets.to(first.device))


@dataclass(frozen=True, eq=False)
class Moves:
    """Which blocks turn how far: on the device, ready for every group of layers with the same rotation."""

    block_ids: torch.Tensor  # int32 [num_moved]
    turn_ids: torch.Tensor  # int32 [num_moved], rows of `turns`
    turns: torch.Tensor  # float32 [num_distances, rotary_dim]


def check_moves(block_ids: np.ndarray, distances: np.ndarray, num_blocks: int) -> None:
    """Raises ValueError for an id outside [0, num_blocks), and for a block named twice: its two turns would
    race. Both int64 [num_moved]."""
    if block_ids.ndim != 1 or block_ids.shape != distances.shape:
        raise ValueError(f"{block_ids.shape} block ids and {distances.shape} distances do not match")
    if len(block_ids) and (block_ids.min() < 0 or block_ids.max() >= num_blocks):
        found = f"{block_ids.min()} to {block_ids.max()}"
        raise ValueError(f"block ids must be from 0 to {num_blocks - 1}, not {found}")
    named = np.zeros(num_blocks, dtype=np.bool_)  # a tenth of what sorting thousands of ids costs
    named[block_ids] = True
    if np.count_nonzero(named) < len(block_ids):
        raise ValueError("a block is moved twice")


def plan_moves(
    block_ids: Sequence[int] | np.ndarray,
    distances: Sequence[int] | np.ndarray,
    rotation: Rotation,
    num_blocks: int,
    device: torch.device | str,
) -> Moves:
    """Moves of whole blocks, each by its own distance in tokens (back where positive).

    One copy to the device from pinned memory, which the host does not wait for. Raises what `check_moves`
    raises.
    """
    ids, tokens = np.asarray(block_ids, dtype=np.int64), np.asarray(distances, dtype=np.int64)
    check_moves(ids, tokens, num_blocks)
    different, turn_ids = np.unique(tokens, return_inverse=True)
    num, shape = len(ids), (len(different), rotation.rotary_dim)
    # Each part begins at a multiple of 16 bytes: Triton would compile anew for another alignment.
    padded = -(-num // 4) * 4
    device = torch.device(device)
    packed = torch.empty(
        2 * padded + shape[0] * shape[1], dtype=torch.int32, pin_memory=device.type == "cuda"
    )
    words = packed.numpy()
    words[:num], words[padded : padded + num] = ids, turn_ids
    words[2 * padded :].view(np.float32).reshape(shape)[:] = turn_table(different, rotation)
    packed = packed.to(device, non_blocking=True)
    turns = packed[2 * padded :].view(torch.float32).view(shape)
    return Moves(packed[:num], packed[padded : padded + num], turns)


def rebase_keys(caches: KeyCaches, moves: Moves, rotation: Rotation, config: Config | None = None) -> None:
    """Turn the keys of the moved blocks back in place, in all layers, with one launch.

    Whole blocks are turned: slots that hold no key hold what they held, turned (NaN stays NaN, in its slot).
    No other block is read or written. Arithmetic is float32, rounded once to the cache's dtype. The host
    reads no device value. Raises ValueError for a rotation or moves that do not fit the caches.
    """
    config = config or Config()
    first, num_moved = caches.layers[0], len(moves.block_ids)
    _, block_size, num_heads, head_size = first.shape
    pairs = rotation.rotary_dim // 2
    if not 0 < rotation.rotary_dim <= head_size:
        raise ValueError(f"{rotation.rotary_dim} rotary dimensions do not fit heads of {head_size}")
    if moves.turns.shape[1] != rotation.rotary_dim or moves.turns.device != first.device:
        found = f"{moves.turns.shape[1]} dimensions on {moves.turns.device}"
        raise ValueError(f"moves were planned for {found}, not {rotation.rotary_dim} on {first.device}")
    if num_moved == 0:
        return
    tiles = triton.cdiv(num_heads * block_size, config.rows)
    launch: Any = kernel.rebase_kernel[(num_moved * tiles, len(caches.layers))]
    launch(
        first,
        caches.offsets,
        moves.block_ids,
        moves.turn_ids,
        moves.turns,
        *first.stride()[:3],
        NUM_HEADS=num_heads,
        BLOCK_SIZE=block_size,
        PAIRS=pairs,
        PAIRS_PADDED=triton.next_power_of_2(pairs),
        OFFSET_UNIT=ALIGNMENT // first.element_size(),
        ROWS=config.rows,
        IS_NEOX=rotation.is_neox,
        SATURATE=FP8_MAX if first.dtype == FP8 else 0.0,
        num_warps=config.num_warps,
    )
