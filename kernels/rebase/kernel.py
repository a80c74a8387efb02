"""The Triton kernel that turns cached keys back. `launcher.py` checks and launches it."""

import triton
import triton.language as tl


@triton.jit
def rebase_kernel(
    key_ptr,  # the first layer's keys, [num_blocks, BLOCK_SIZE, NUM_HEADS, head_size]; read and written
    layer_offsets_ptr,  # [num_layers] int64, from the first layer's keys, in units of OFFSET_UNIT elements
    block_ids_ptr,  # [num_moved] int32
    turn_ids_ptr,  # [num_moved] int32, rows of turns_ptr
    turns_ptr,  # [num_turns, 2 * PAIRS] float32, cosines and sines
    stride_block,
    stride_token,
    stride_head,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAIRS: tl.constexpr,  # half of the rotary dimensions
    PAIRS_PADDED: tl.constexpr,
    OFFSET_UNIT: tl.constexpr,
    ROWS: tl.constexpr,  # keys per program, a key being one slot of one head
    IS_NEOX: tl.constexpr,
    SATURATE: tl.constexpr,  # the largest number of the cache's dtype, 0 where it has an infinity
):
    TILES: tl.constexpr = (NUM_HEADS * BLOCK_SIZE + ROWS - 1) // ROWS
    moved = tl.program_id(0) // TILES
    layer = tl.program_id(1)
    block = tl.load(block_ids_ptr + moved).to(tl.int64)
    turn = turns_ptr + tl.load(turn_ids_ptr + moved) * (2 * PAIRS)
    # Offsets in units of 16 bytes let the compiler see that rows are aligned.
    keys = key_ptr + tl.load(layer_offsets_ptr + layer) * OFFSET_UNIT + block * stride_block

    row = tl.program_id(0) % TILES * ROWS + tl.arange(0, ROWS)
    real_row = (row < NUM_HEADS * BLOCK_SIZE)[:, None]
    rows = keys + (row // NUM_HEADS * stride_token + row % NUM_HEADS * stride_head)[:, None]
    pair = tl.arange(0, PAIRS_PADDED)
    cos = tl.load(turn + pair, mask=pair < PAIRS, other=1.0)[None, :]
    sin = tl.load(turn + PAIRS + pair, mask=pair < PAIRS, other=0.0)[None, :]
    if IS_NEOX:
        where = rows + pair[None, :]
        real = real_row & (pair < PAIRS)[None, :]
        a = tl.load(where, mask=real, other=0.0).to(tl.float32)
        b = tl.load(where + PAIRS, mask=real, other=0.0).to(tl.float32)
    else:
        dim = tl.arange(0, 2 * PAIRS_PADDED)
        where = rows + dim[None, :]
        real = real_row & (dim < 2 * PAIRS)[None, :]
        both = tl.load(where, mask=real, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(both, (ROWS, PAIRS_PADDED, 2)))
    new_a = a * cos + b * sin
    new_b = b * cos - a * sin
    if SATURATE > 0:  # by comparison, so that NaN stays NaN
        new_a = tl.where(new_a > SATURATE, SATURATE, tl.where(new_a < -SATURATE, -SATURATE, new_a))
        new_b = tl.where(new_b > SATURATE, SATURATE, tl.where(new_b < -SATURATE, -SATURATE, new_b))
    dtype = key_ptr.dtype.element_ty
    if IS_NEOX:
        tl.store(where, new_a.to(dtype), mask=real)
        tl.store(where + PAIRS, new_b.to(dtype), mask=real)
    else:
        tl.store(where, tl.interleave(new_a, new_b).to(dtype), mask=real)
