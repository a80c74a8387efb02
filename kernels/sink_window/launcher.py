"""The checked launcher of the sink-window kernels, its configuration and its scratch memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from kernels.sink_window import kernel

HEAD_SIZES = (64, 80, 96, 128, 256)
FP8 = torch.float8_e4m3fn
LOG2_E = 1.4426950408889634
UNLIMITED = 1 << 30  # a window that no sequence reaches; t - UNLIMITED + 1 stays inside int32


@dataclass(frozen=True)
class Config:
    """How the work is cut. A row's bits depend on these and on its own sequence, never on its batch."""

    num_splits: int  # programs that share the visible keys of a decode, per KV head
    decode_tile: int  # keys per step, a power of two
    block_m: int  # rows (pairs of a query and a head of its group) per mixed program
    mixed_tile: int
    mixed_warps: int = 4
    mixed_stages: int = 3
    decode_warps: int = 4
    decode_stages: int = 3
    split_align: int = 32  # a split is a multiple of so many keys
    split_decodes: bool = True  # False: mixed_kernel takes sequences of one query too
    stock_rounding: bool = False  # True: mixed_kernel rounds in the order of vLLM's stock kernel


@dataclass(frozen=True)
class Scratch:
    """Partial results of split decodes, reused by every launch of one stream: all layers share one.

    Allocate it once, outside of CUDA graph capture. `arrived` is zero between launches.
    """

    partial: torch.Tensor  # [max_num_seqs, num_heads, num_splits, head_size] float32
    partial_max: torch.Tensor  # [max_num_seqs, num_heads, num_splits] float32
    partial_sum: torch.Tensor  # [max_num_seqs, num_heads, num_splits] float32
    arrived: torch.Tensor  # [max_num_seqs, num_kv_heads] int32

    @classmethod
    def allocate(
        cls,
        max_num_seqs: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        window: int | None,
        device: torch.device | str,
        splits: int | None = None,
    ) -> Scratch:
        """Scratch for batches of up to `max_num_seqs` sequences with this window (tokens; None: unlimited).

        `splits` overrides the number of splits, for a Config that does.
        """
        rows = (max_num_seqs, num_heads, splits or num_splits(window))
        return cls(
            torch.empty((*rows, head_size), dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.zeros((max_num_seqs, num_kv_heads), dtype=torch.int32, device=device),
        )


def num_splits(window: int | None) -> int:
    """Splits of one decode: a function of W alone, so that a row's bits never depend on its batch."""
    return min(16, -(-window // 256)) if window else 16


def default_config(head_size: int, window: int | None) -> Config:
    """The configuration measured best on an H200 (bench/results/sink_window.md)."""
    wide = head_size > 128
    return Config(
        num_splits=num_splits(window),
        decode_tile=64 if head_size == 64 else 32,
        block_m=128 if wide else 64,
        mixed_tile=32 if wide else 64,
        mixed_warps=8 if wide else 4,
    )


def sink_window_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_query_len: int,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    num_sink_tokens: torch.Tensor,
    window: int | None,
    scale: float,
    out: torch.Tensor,
    scratch: Scratch,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    config: Config | None = None,
) -> None:
    """Write the attention of every query of a batch that mixes prefill chunks and decodes into `out`.

    The query at absolute position t of its sequence sees the keys [0, S) and [t - W + 1, t].

    query            [num_tokens, num_heads, head_size] bf16 or fp16
    key_cache, value_cache  [num_blocks, block_size, num_kv_heads, head_size] in query's dtype or fp8 (e4m3):
                     views of any strides, the same in both
    cu_seqlens_q     [num_seqs + 1] int32: sequence i's newest tokens are query[cu[i]:cu[i+1]], maybe none
    max_query_len    int, the longest query; 1 promises that no sequence has more than one token
    seq_lens         [num_seqs] int32: positions in each sequence, new and evicted ones counted
    block_table      [num_seqs or more, max_blocks] int32; entries without a visible key may hold anything
    num_sink_tokens  [num_seqs] int32: S of each sequence, in tokens
    window           W in tokens, the query's own counted; None or 0: unlimited, plain causal attention
    scale            softmax scale, positive
    out              as query; rows past cu_seqlens_q[-1] stay as they are; a query that sees no key gets 0
    scratch          `Scratch.allocate(...)` for num_seqs sequences or more and the same window
    k_scale, v_scale one float32 each, on the device; required for an fp8 cache, ignored otherwise

    query, out and the caches are contiguous in their last dimension. The host reads no device value, and
    grids depend on shapes and max_query_len only: a launch can be captured in a CUDA graph. Raises ValueError
    for a wrong shape, dtype, device or stride.
    """
    num_tokens, num_heads, head_size = query.shape
    num_seqs = seq_lens.shape[0]
    _, block_size, num_kv_heads, _ = key_cache.shape
    config = config or default_config(head_size, window)
    _check_tensors(query, key_cache, value_cache, out)
    _check_batch(query, cu_seqlens_q, seq_lens, block_table, num_sink_tokens, window, scale)
    if config.split_decodes:
        _check_scratch(scratch, num_seqs, num_heads, num_kv_heads, head_size, config.num_splits)
    kv_is_fp8 = key_cache.dtype == FP8
    if kv_is_fp8 and (k_scale is None or v_scale is None):
        raise ValueError("an fp8 cache needs k_scale and v_scale")
    if num_tokens == 0 or num_seqs == 0:
        return

    group = num_heads // num_kv_heads
    window = min(window or UNLIMITED, UNLIMITED)
    tensors = (out, query, key_cache, value_cache, block_table, cu_seqlens_q, seq_lens, num_sink_tokens)
    tensors += (k_scale, v_scale)
    strides = (block_table.stride(0), *out.stride()[:2], *query.stride()[:2], *key_cache.stride()[:3])
    shape = {
        "GROUP": group,
        "HEAD_SIZE": head_size,
        "HEAD_PADDED": triton.next_power_of_2(head_size),
        "BLOCK_SIZE": block_size,
        "KV_IS_FP8": kv_is_fp8,
    }
    if max_query_len > 1 or not config.split_decodes:
        options = shape | {
            "BLOCK_M": config.block_m,
            "TILE": config.mixed_tile,
            "SKIP_DECODES": config.split_decodes,
            "STOCK_ROUNDING": config.stock_rounding,
            "num_warps": config.mixed_warps,
            "num_stages": config.mixed_stages,
        }
        # Sequence i starts at program cu_seqlens_q[i] * group // block_m + i: enough whatever the lengths.
        grid = (num_tokens * group // config.block_m + num_seqs, num_kv_heads)
        mixed_scale = scale if config.stock_rounding else scale * LOG2_E
        launch: Any = kernel.mixed_kernel[grid]
        launch(*tensors, mixed_scale, window, num_seqs, *strides, **options)
    if config.split_decodes:
        options = shape | {
            "num_kv_heads": num_kv_heads,
            "BLOCK_M": max(16, triton.next_power_of_2(group)),
            "TILE": config.decode_tile,
            "NUM_SPLITS": config.num_splits,
            "SPLIT_ALIGN": config.split_align,
            "num_warps": config.decode_warps,
            "num_stages": config.decode_stages,
        }
        grid = (num_kv_heads, config.num_splits, num_seqs)
        partials = (scratch.partial, scratch.partial_max, scratch.partial_sum, scratch.arrived)
        launch: Any = kernel.decode_kernel[grid]
        launch(*tensors, *partials, scale * LOG2_E, window, *strides, **options)


# The checks run for every layer of every step outside CUDA graphs: messages are built on failure only.


def _check_tensors(
    query: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, out: torch.Tensor
) -> None:
    num_heads, head_size = query.shape[1:]
    block_size, num_kv_heads, cache_head_size = key_cache.shape[1:]
    if query.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"query must be bfloat16 or float16, not {query.dtype}")
    if head_size not in HEAD_SIZES:
        raise ValueError(f"head size {head_size} is not one of {HEAD_SIZES}")
    if out.shape != query.shape or out.dtype != query.dtype:
        expected = f"{tuple(query.shape)} {query.dtype}"
        raise ValueError(f"out must be {expected}, not {tuple(out.shape)} {out.dtype}")
    if cache_head_size != head_size or num_heads % num_kv_heads != 0:
        cache = f"a cache of {num_kv_heads} heads of {cache_head_size}"
        raise ValueError(f"{num_heads} query heads of {head_size} do not fit {cache}")
    if key_cache.dtype not in (query.dtype, FP8):
        raise ValueError(f"the cache must be {query.dtype} or {FP8}, not {key_cache.dtype}")
    if block_size % 16 != 0:
        raise ValueError(f"block size {block_size} is not a multiple of 16")
    kinds = [(cache.shape, cache.stride(), cache.dtype) for cache in (key_cache, value_cache)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"key_cache and value_cache differ in shape, strides or dtype: {kinds}")
    if query.stride(2) != 1 or key_cache.stride(3) != 1 or out.stride(2) != 1:
        raise ValueError("query, out and the caches must be contiguous in their last dimension")


def _check_batch(
    query: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    num_sink_tokens: torch.Tensor,
    window: int | None,
    scale: float,
) -> None:
    num_seqs = seq_lens.shape[0]
    if cu_seqlens_q.shape != (num_seqs + 1,) or num_sink_tokens.shape != (num_seqs,):
        shapes = f"{tuple(cu_seqlens_q.shape)} and {tuple(num_sink_tokens.shape)}"
        raise ValueError(f"{num_seqs} sequences need cu_seqlens_q and num_sink_tokens to match, not {shapes}")
    if block_table.dim() != 2 or block_table.shape[0] < num_seqs or block_table.stride(1) != 1:
        expected = f"[{num_seqs} or more, max_blocks] with contiguous rows"
        raise ValueError(f"block_table must be {expected}, not {tuple(block_table.shape)}")
    for tensor in (cu_seqlens_q, seq_lens, block_table, num_sink_tokens):
        if tensor.dtype != torch.int32 or tensor.device != query.device:
            found = f"{tensor.dtype} on {tensor.device}"
            raise ValueError(f"indices and lengths must be int32 on {query.device}, not {found}")
    if window is not None and window < 0:
        raise ValueError(f"window must be None or >= 0, not {window}")
    if not scale > 0:
        raise ValueError(f"scale must be positive, not {scale}")


def _check_scratch(
    scratch: Scratch, num_seqs: int, num_heads: int, num_kv_heads: int, head_size: int, splits: int
) -> None:
    rows = scratch.partial.shape[0]
    held = (*scratch.partial.shape[1:], scratch.arrived.shape[1])
    if rows < num_seqs or held != (num_heads, splits, head_size, num_kv_heads):
        need = f"{num_seqs} of {(num_heads, splits, head_size, num_kv_heads)}"
        raise ValueError(
            f"scratch holds {rows} sequences of (heads, splits, size, KV heads) {held}, not {need}"
        )
