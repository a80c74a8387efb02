"""Triton kernels of sink-window attention over a paged KV cache. `launcher.py` checks and launches them.

Decode (one query per sequence) lists the visible keys without the gap, 0..n-1, cuts the list into splits and
reduces them. Mixed (prefill chunks) walks tiles aligned to absolute positions: sink tiles, a jump, window
tiles. Neither reads a block-table entry or a cache slot that no query of the program can see.
"""

import triton
import triton.language as tl

SEARCH = tl.constexpr(256)  # sequences that mixed_kernel looks through at once


@triton.jit(do_not_specialize=["window"])
def decode_kernel(
    out_ptr,  # [num_tokens, num_heads, HEAD_SIZE]
    query_ptr,  # [num_tokens, num_heads, HEAD_SIZE]
    key_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_SIZE]
    value_ptr,  # the same shape and strides as the keys
    block_table_ptr,  # [num_seqs, max_blocks] int32
    cu_seqlens_q_ptr,  # [num_seqs + 1] int32
    seq_lens_ptr,  # [num_seqs] int32
    num_sink_tokens_ptr,  # [num_seqs] int32
    k_scale_ptr,  # [1] float32, read only where KV_IS_FP8
    v_scale_ptr,
    partial_ptr,  # [num_seqs, num_heads, NUM_SPLITS, HEAD_SIZE] float32, not normalised
    partial_max_ptr,  # [num_seqs, num_heads, NUM_SPLITS] float32, base-2 logits
    partial_sum_ptr,  # [num_seqs, num_heads, NUM_SPLITS] float32
    arrived_ptr,  # [num_seqs, num_kv_heads] int32, zero before and after
    scale_log2,  # softmax scale times log2(e), positive
    window,
    block_table_stride,
    out_stride_token,
    out_stride_head,
    query_stride_token,
    query_stride_head,
    cache_stride_block,
    cache_stride_token,
    cache_stride_head,
    num_kv_heads: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    BLOCK_M: tl.constexpr,  # GROUP padded to what tl.dot takes
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SPLIT_ALIGN: tl.constexpr,
    KV_IS_FP8: tl.constexpr,
):
    kv_head = tl.program_id(0)
    seq = tl.program_id(2)
    token = tl.load(cu_seqlens_q_ptr + seq)
    query_len = tl.load(cu_seqlens_q_ptr + seq + 1) - token
    seq_len = tl.load(seq_lens_ptr + seq)
    sinks = tl.load(num_sink_tokens_ptr + seq)
    if query_len != 1:
        return

    # The visible keys are [0, head) and [low, seq_len): num_keys of them, the gap cut out.
    low = tl.maximum(seq_len - window, 0)
    head = tl.minimum(tl.maximum(sinks, 0), low)
    gap = low - head
    num_keys = tl.maximum(seq_len - gap, 0)
    per_split = ((num_keys + NUM_SPLITS * SPLIT_ALIGN - 1) // (NUM_SPLITS * SPLIT_ALIGN)) * SPLIT_ALIGN
    num_active = (num_keys + per_split - 1) // tl.maximum(per_split, 1)
    split = tl.program_id(1)
    # Split 0 runs even over no keys: it must write the zeros.
    if (split >= num_active) & (split > 0):
        return
    begin = split * per_split
    end = tl.minimum(begin + per_split, num_keys)

    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_PADDED)
    offs_t = tl.arange(0, TILE)
    real_d = offs_d < HEAD_SIZE
    q_head = kv_head * GROUP + offs_m
    real = (offs_m < GROUP)[:, None] & real_d[None, :]
    token = token.to(tl.int64)
    query_offs = token * query_stride_token + q_head[:, None] * query_stride_head + offs_d[None, :]
    q = tl.load(query_ptr + query_offs, mask=real, other=0.0)
    if KV_IS_FP8:
        # fp8 widens to fp16 in one instruction, to bf16 in several. A sixty-fourth of a bf16 query fits fp16.
        q = (q.to(tl.float32) * 0.015625).to(tl.float16)
        scale_log2 *= 64.0 * tl.load(k_scale_ptr)

    table_row = block_table_ptr + seq.to(tl.int64) * block_table_stride
    key_row = key_ptr + kv_head.to(tl.int64) * cache_stride_head + offs_d[None, :]
    value_row = value_ptr + kv_head.to(tl.int64) * cache_stride_head + offs_d[None, :]
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.full([BLOCK_M], 0.0, dtype=tl.float32)
    acc = tl.full([BLOCK_M, HEAD_PADDED], 0.0, dtype=tl.float32)

    # Lanes past the end repeat the last visible key: in bounds without masks, and dropped by the softmax.
    index = tl.minimum(begin + offs_t, end - 1)
    pos = (index + tl.where(index >= head, gap, 0)).to(tl.uint32)
    block = tl.load(table_row + pos // BLOCK_SIZE, mask=index >= 0, other=0)
    for start in range(begin, end, TILE):
        slot = block.to(tl.int64) * cache_stride_block + (pos % BLOCK_SIZE).to(tl.int32) * cache_stride_token
        # One tile ahead, so that the loads of keys and values never wait for the block table.
        index = tl.minimum(start + TILE + offs_t, end - 1)
        pos = (index + tl.where(index >= head, gap, 0)).to(tl.uint32)
        block = tl.load(table_row + pos // BLOCK_SIZE)
        if HEAD_SIZE == HEAD_PADDED:
            k = tl.load(key_row + slot[:, None]).to(q.dtype)
            v = tl.load(value_row + slot[:, None]).to(q.dtype)
        else:
            k = tl.load(key_row + slot[:, None], mask=real_d[None, :], other=0.0).to(q.dtype)
            v = tl.load(value_row + slot[:, None], mask=real_d[None, :], other=0.0).to(q.dtype)
        scores = tl.where((start + offs_t < end)[None, :], tl.dot(q, tl.trans(k)), float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        p = tl.exp2(scores * scale_log2 - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype), v, acc * rescale[:, None])
        row_max = new_max

    real_m = offs_m < GROUP
    stat_offs = (seq.to(tl.int64) * (num_kv_heads * GROUP) + q_head) * NUM_SPLITS
    part_offs = stat_offs[:, None] * HEAD_SIZE + offs_d[None, :]
    tl.store(partial_ptr + part_offs + split * HEAD_SIZE, acc, mask=real)
    tl.store(partial_max_ptr + stat_offs + split, row_max, mask=real_m)
    tl.store(partial_sum_ptr + stat_offs + split, row_sum, mask=real_m)
    # Every thread's stores come before the count (release), every later load after it (acquire).
    tl.debug_barrier()
    arrived = arrived_ptr + seq * num_kv_heads + kv_head
    if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") + 1 < num_active:
        return
    tl.debug_barrier()
    tl.store(arrived, 0)
    # The last to arrive folds the splits in order 0, 1, ..., so the bits do not depend on who is last.
    # Unrolled, because every round would wait for its loads.
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.full([BLOCK_M], 0.0, dtype=tl.float32)
    acc = tl.full([BLOCK_M, HEAD_PADDED], 0.0, dtype=tl.float32)
    for i in tl.range(0, num_active, loop_unroll_factor=4):  # pyright: ignore[reportGeneralTypeIssues]
        part = tl.load(partial_ptr + part_offs + i * HEAD_SIZE, mask=real, other=0.0, cache_modifier=".cg")
        part_max = tl.load(partial_max_ptr + stat_offs + i, mask=real_m, other=0.0, cache_modifier=".cg")
        part_sum = tl.load(partial_sum_ptr + stat_offs + i, mask=real_m, other=0.0, cache_modifier=".cg")
        new_max = tl.maximum(row_max, part_max)
        rescale = tl.exp2(row_max - new_max)
        weight = tl.exp2(part_max - new_max)
        row_sum = row_sum * rescale + part_sum * weight
        acc = acc * rescale[:, None] + part * weight[:, None]
        row_max = new_max
    # No key at all: 0 / 1.
    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    if KV_IS_FP8:
        acc *= tl.load(v_scale_ptr)
    out_offs = token * out_stride_token + q_head[:, None] * out_stride_head + offs_d[None, :]
    tl.store(out_ptr + out_offs, acc.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["window", "num_seqs"])
def mixed_kernel(
    out_ptr,  # as for decode_kernel
    query_ptr,
    key_ptr,
    value_ptr,
    block_table_ptr,
    cu_seqlens_q_ptr,
    seq_lens_ptr,
    num_sink_tokens_ptr,
    k_scale_ptr,
    v_scale_ptr,
    scale,  # softmax scale, positive; times log2(e) unless STOCK_ROUNDING
    window,
    num_seqs,
    block_table_stride,
    out_stride_token,
    out_stride_head,
    query_stride_token,
    query_stride_head,
    cache_stride_block,
    cache_stride_token,
    cache_stride_head,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows (pairs of a query and a head) per program
    HEAD_SIZE: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SKIP_DECODES: tl.constexpr,  # leave sequences of one query to decode_kernel
    STOCK_ROUNDING: tl.constexpr,  # scale first and use exp, as vLLM's kernel; otherwise exp2 of one fma
    KV_IS_FP8: tl.constexpr,
):
    row_block = tl.program_id(0)
    kv_head = tl.program_id(1)
    # A sequence's rows are its (query, head of the group) pairs, query first. Sequence i owns the program ids
    # from cu_seqlens_q[i] * GROUP // BLOCK_M + i on: ours is the last that starts at or below our id.
    # Counting is one round trip to memory, a binary search one for every halving.
    seq = -1
    for start in range(0, num_seqs, SEARCH):
        index = start + tl.arange(0, SEARCH)
        first = tl.load(cu_seqlens_q_ptr + index, mask=index < num_seqs, other=0) * GROUP // BLOCK_M + index
        started = (first <= row_block) & (index < num_seqs)
        seq += tl.sum(started.to(tl.int32), 0)  # pyright: ignore[reportOperatorIssue]
    token = tl.load(cu_seqlens_q_ptr + seq)
    query_len = tl.load(cu_seqlens_q_ptr + seq + 1) - token
    seq_len = tl.load(seq_lens_ptr + seq)
    sinks = tl.load(num_sink_tokens_ptr + seq)
    first_row = (row_block - (token * GROUP // BLOCK_M + seq)) * BLOCK_M
    if first_row >= query_len * GROUP:
        return
    if SKIP_DECODES:
        if query_len == 1:
            return

    # Keys that some query of this program sees: [0, sinks) and [low, high), none at or past high.
    context_len = seq_len - query_len
    first_pos = context_len + first_row // GROUP
    high = tl.maximum(tl.minimum(context_len + (first_row + BLOCK_M - 1) // GROUP + 1, seq_len), 0)
    low = tl.maximum(first_pos - window + 1, 0)
    window_tile = low // TILE
    # Sink tiles stop where the window's first tile begins, so no tile is walked twice.
    sink_tiles = tl.minimum((tl.minimum(tl.maximum(sinks, 0), high) + TILE - 1) // TILE, window_tile)
    num_tiles = sink_tiles + (high + TILE - 1) // TILE - window_tile
    jump = window_tile - sink_tiles

    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_PADDED)
    offs_t = tl.arange(0, TILE)
    real_d = offs_d < HEAD_SIZE
    row = first_row + offs_m
    query_index = row // GROUP
    q_head = kv_head * GROUP + row % GROUP
    real_m = query_index < query_len
    real = real_m[:, None] & real_d[None, :]
    tokens = (token + query_index).to(tl.int64)
    query_offs = tokens[:, None] * query_stride_token + q_head[:, None] * query_stride_head + offs_d[None, :]
    q = tl.load(query_ptr + query_offs, mask=real, other=0.0)
    query_pos = context_len + query_index
    if KV_IS_FP8:
        q = (q.to(tl.float32) * 0.015625).to(tl.float16)  # as in decode_kernel
        scale *= 64.0 * tl.load(k_scale_ptr)

    table_row = block_table_ptr + tl.cast(seq, tl.int64) * block_table_stride
    key_row = key_ptr + kv_head.to(tl.int64) * cache_stride_head + offs_d[None, :]
    value_row = value_ptr + kv_head.to(tl.int64) * cache_stride_head + offs_d[None, :]
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    row_sum = tl.full([BLOCK_M], 0.0, dtype=tl.float32)
    acc = tl.full([BLOCK_M, HEAD_PADDED], 0.0, dtype=tl.float32)

    # Lanes that no query sees read the newest visible key instead: in bounds without masks, and -inf below.
    pos = tl.where(sink_tiles > 0, 0, jump) * TILE + offs_t
    live = (pos < high) & ((pos < sinks) | (pos >= low))
    near = tl.where(live, pos, high - 1).to(tl.uint32)
    block = tl.load(table_row + near // BLOCK_SIZE, mask=(near < high), other=0)
    for i in range(0, num_tiles):
        tile_start = (i + tl.where(i >= sink_tiles, jump, 0)) * TILE
        slot = block.to(tl.int64) * cache_stride_block + (near % BLOCK_SIZE).to(tl.int32) * cache_stride_token
        # The block table one tile ahead, as in decode_kernel.
        pos = (i + 1 + tl.where(i + 1 >= sink_tiles, jump, 0)) * TILE + offs_t
        live = (pos < high) & ((pos < sinks) | (pos >= low))
        near = tl.where(live, pos, high - 1).to(tl.uint32)
        block = tl.load(table_row + near // BLOCK_SIZE)
        if HEAD_SIZE == HEAD_PADDED:
            k = tl.load(key_row + slot[:, None]).to(q.dtype)
            v = tl.load(value_row + slot[:, None]).to(q.dtype)
        else:
            k = tl.load(key_row + slot[:, None], mask=real_d[None, :], other=0.0).to(q.dtype)
            v = tl.load(value_row + slot[:, None], mask=real_d[None, :], other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k))
        if STOCK_ROUNDING:
            scores *= scale
        # Most tiles are seen whole by every query.
        if (tile_start + TILE > first_pos + 1) | (tile_start < high - window):
            key_pos = tile_start + offs_t
            distance = query_pos[:, None] - key_pos[None, :]
            seen = (distance >= 0) & ((distance < window) | (key_pos < sinks)[None, :])
            scores = tl.where(seen, scores, float("-inf"))
        if STOCK_ROUNDING:
            new_max = tl.maximum(row_max, tl.max(scores, 1))
        else:
            new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        # A row may see nothing of its first tiles: -inf - -inf would be NaN.
        finite_max = tl.where(new_max > float("-inf"), new_max, 0.0)
        if STOCK_ROUNDING:
            p = tl.exp(scores - finite_max[:, None])
            rescale = tl.exp(row_max - finite_max)
        else:
            p = tl.exp2(scores * scale - finite_max[:, None])
            rescale = tl.exp2(row_max - finite_max)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc = tl.dot(p.to(q.dtype), v, acc * rescale[:, None])
        row_max = new_max

    acc = acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    if KV_IS_FP8:
        acc *= tl.load(v_scale_ptr)
    out_offs = tokens[:, None] * out_stride_token + q_head[:, None] * out_stride_head + offs_d[None, :]
    tl.store(out_ptr + out_offs, acc.to(out_ptr.dtype.element_ty), mask=real)
