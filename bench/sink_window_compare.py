"""Sink-window attention beside vLLM's attention kernels and FlashAttention-3, on the same inputs, on a GPU.

    python -m bench.sink_window_compare --out bench/results/sink_window.json

Times are medians of CUDA graph replays with a cold L2 (kernels/sink_window/bench.py says how).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.sink_window_stock import flash3, stock_triton
from kernels.sink_window.bench import Inputs

SEGMENTS = 16  # vLLM 0.32's NUM_PAR_SOFTMAX_SEGMENTS, and its threshold of 128 programs below
Launches = list[Callable[[], None]]


def stock(inputs: Inputs, window: int | None, prefix: bool = False) -> Launches:
    """vLLM's stock Triton kernel: windowed, full (window None), or with its R-SWA mask (prefix True), whose
    prefix is our sinks. Launched as vLLM does: segmented where the batch is small."""
    case, size = inputs.case, inputs.case.head_size
    threshold = 128 // case.num_kv_heads
    rows = (threshold, case.num_heads, SEGMENTS)
    segment_out = torch.empty((*rows, size), dtype=torch.float32, device=inputs.query.device)
    segment_max, segment_sum = (
        torch.empty(rows, dtype=torch.float32, device=inputs.query.device) for _ in "ms"
    )
    attention = stock_triton().unified_attention

    def launch(table: torch.Tensor) -> Callable[[], None]:
        return lambda: attention(
            q=inputs.query,
            k=inputs.key_cache,
            v=inputs.value_cache,
            out=inputs.out,
            cu_seqlens_q=inputs.cu_seqlens_q,
            max_seqlen_q=inputs.max_query_len,
            seqused_k=inputs.seq_lens,
            max_seqlen_k=inputs.max_seq_len,
            softmax_scale=size**-0.5,
            causal=True,
            window_size=(-1, -1) if prefix or window is None else (window - 1, 0),
            block_table=table,
            softcap=0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            seq_threshold_3D=threshold,
            num_par_softmax_segments=SEGMENTS,
            softmax_segm_output=segment_out,
            softmax_segm_max=segment_max,
            softmax_segm_expsum=segment_sum,
            rswa_prefix_lens=inputs.num_sink_tokens if prefix else None,
            rswa_window=window if prefix else None,
        )

    return [launch(table) for table in inputs.full_tables]


def flash(inputs: Inputs, window: int | None, num_splits: int) -> Launches:
    """FlashAttention-3, windowed or full, scheduled ahead as in vLLM's CUDA graphs (num_splits 32 there)."""
    case = inputs.case
    attention, metadata = flash3()
    bounds = [-1, -1] if window is None else [window - 1, 0]
    schedule = metadata(
        batch_size=len(case.rows),
        max_seqlen_q=inputs.max_query_len,
        max_seqlen_k=inputs.max_seq_len,
        num_heads_q=case.num_heads,
        num_heads_kv=case.num_kv_heads,
        headdim=case.head_size,
        cache_seqlens=inputs.seq_lens,
        qkv_dtype=case.dtype,
        cu_seqlens_q=inputs.cu_seqlens_q,
        page_size=case.block_size,
        causal=True,
        window_size=bounds,
        num_splits=num_splits,
    )

    def launch(table: torch.Tensor) -> Callable[[], None]:
        return lambda: attention(
            q=inputs.query,
            k=inputs.key_cache,
            v=inputs.value_cache,
            out=inputs.out,
            cu_seqlens_q=inputs.cu_seqlens_q,
            max_seqlen_q=inputs.max_query_len,
            seqused_k=inputs.seq_lens,
            max_seqlen_k=inputs.max_seq_len,
            softmax_scale=case.head_size**-0.5,
            causal=True,
            window_size=bounds,
            block_table=table,
            scheduler_metadata=schedule,
            num_splits=num_splits,
            fa_version=3,
        )

    return [launch(table) for table in inputs.full_tables]
