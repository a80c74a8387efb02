"""The checked launcher of the sink-window kernels.

What a layer's launches have in common is checked and laid out once (`Layer`), what a step's have in common
once a step (`Step`); `launch` is what is left to do for each layer of each step, while the device waits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from kernels.sink_window import kernel
from kernels.sink_window.config import Config, Scratch, default_config

HEAD_SIZES = (64, 80, 96, 128, 256)
FP8 = torch.float8_e4m3fn
LOG2_E = 1.4426950408889634
UNLIMITED = 1 << 30  # a window that no sequence reaches; t - UNLIMITED + 1 stays inside int32


class Layer:
    """A layer's cache and everything that its launches share; arguments as for `sink_window_attention`.

    num_heads        query heads
    dtype            of queries and outputs, bf16 or fp16

    Holds on to the cache. Raises ValueError for a wrong shape, dtype or stride.
    """

    def __init__(
        self,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        num_heads: int,
        dtype: torch.dtype,
        window: int | None,
        scale: float,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        config: Config | None = None,
    ) -> None:
        _check_cache(key_cache, value_cache, num_heads, dtype)
        _check_numbers(window, scale)
        block_size, num_kv_heads, head_size = key_cache.shape[1:]
        is_fp8 = key_cache.dtype == FP8
        if is_fp8 and (k_scale is None or v_scale is None):
            raise ValueError("an fp8 cache needs k_scale and v_scale")
        self.config = config = config or default_config(head_size, window)
        self.dtype, self.num_heads, self.num_kv_heads = dtype, num_heads, num_kv_heads
        self.head_size, self.group = head_size, num_heads // num_kv_heads
        self.caches = (key_cache, value_cache)
        self.cache_strides = key_cache.stride()[:3]
        self.scales = (k_scale, v_scale)
        self.window = min(window or UNLIMITED, UNLIMITED)
        self.decode_scale = scale * LOG2_E
        self.mixed_scale = scale if config.stock_rounding else self.decode_scale
        self.row_shape = (num_heads, head_size)
        self.scratch_shape = (num_heads, config.num_splits, head_size, num_kv_heads)
        shape = {
            "GROUP": self.group,
            "HEAD_SIZE": head_size,
            "HEAD_PADDED": triton.next_power_of_2(head_size),
            "BLOCK_SIZE": block_size,
            "KV_IS_FP8": is_fp8,
        }
        self.mixed_options = shape | {
            "BLOCK_M": config.block_m,
            "TILE": config.mixed_tile,
            "SKIP_DECODES": config.split_decodes,
            "STOCK_ROUNDING": config.stock_rounding,
            "num_warps": config.mixed_warps,
            "num_stages": config.mixed_stages,
        }
        self.decode_options = shape | {
            "num_kv_heads": num_kv_heads,
            "BLOCK_M": max(16, triton.next_power_of_2(self.group)),
            "TILE": config.decode_tile,
            "NUM_SPLITS": config.num_splits,
            "SPLIT_ALIGN": config.split_align,
            "num_warps": config.decode_warps,
            "num_stages": config.decode_stages,
        }


class Step:
    """A batch's rows, the same for every layer; arguments as for `sink_window_attention`.

    num_tokens       queries, those that pad a CUDA graph counted

    Raises ValueError for a wrong shape, dtype, device or stride.
    """

    __slots__ = (
        "max_query_len",
        "num_seqs",
        "num_tokens",
        "rows",
        "scratch",
        "scratch_shape",
        "table_stride",
    )

    def __init__(
        self,
        num_tokens: int,
        max_query_len: int,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        num_sink_tokens: torch.Tensor,
        scratch: Scratch,
    ) -> None:
        _check_rows(cu_seqlens_q, seq_lens, block_table, num_sink_tokens)
        self.num_tokens, self.max_query_len = num_tokens, max_query_len
        self.num_seqs = seq_lens.shape[0]
        self.rows = (block_table, cu_seqlens_q, seq_lens, num_sink_tokens)
        self.table_stride = block_table.stride(0)
        self.scratch = (scratch.partial, scratch.partial_max, scratch.partial_sum, scratch.arrived)
        self.scratch_shape = (scratch.partial.shape[0], *scratch.partial.shape[1:], scratch.arrived.shape[1])


def launch(layer: Layer, step: Step, query: torch.Tensor, out: torch.Tensor) -> None:
    """`sink_window_attention` of a layer in a step. query and out may be longer than the step."""
    _check_queries(layer, step, query, out)
    num_seqs, config = step.num_seqs, layer.config
    if step.num_tokens == 0 or num_seqs == 0:
        return
    tensors = (out, query, *layer.caches, *step.rows, *layer.scales)
    strides = (step.table_stride, *out.stride()[:2], *query.stride()[:2], *layer.cache_strides)
    if step.max_query_len > 1 or not config.split_decodes:
        # Sequence i starts at program cu_seqlens_q[i] * group // block_m + i: enough whatever the lengths.
        grid = (step.num_tokens * layer.group // config.block_m + num_seqs, layer.num_kv_heads)
        mixed: Any = kernel.mixed_kernel[grid]
        mixed(*tensors, layer.mixed_scale, layer.window, num_seqs, *strides, **layer.mixed_options)
    if config.split_decodes:
        decode: Any = kernel.decode_kernel[layer.num_kv_heads, config.num_splits, num_seqs]
        decode(*tensors, *step.scratch, layer.decode_scale, layer.window, *strides, **layer.decode_options)


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
    layer = Layer(
        key_cache, value_cache, query.shape[1], query.dtype, window, scale, k_scale, v_scale, config
    )
    step = Step(query.shape[0], max_query_len, cu_seqlens_q, seq_lens, block_table, num_sink_tokens, scratch)
    if seq_lens.device != query.device:
        raise ValueError(f"indices and lengths must be int32 on {query.device}, not on {seq_lens.device}")
    launch(layer, step, query, out)


def _check_cache(
    key_cache: torch.Tensor, value_cache: torch.Tensor, num_heads: int, dtype: torch.dtype
) -> None:
    block_size, num_kv_heads, head_size = key_cache.shape[1:]
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"query must be bfloat16 or float16, not {dtype}")
    if head_size not in HEAD_SIZES:
        raise ValueError(f"head size {head_size} is not one of {HEAD_SIZES}")
    if num_heads % num_kv_heads != 0:
        raise ValueError(f"{num_heads} query heads do not fit a cache of {num_kv_heads} heads")
    if key_cache.dtype not in (dtype, FP8):
        raise ValueError(f"the cache must be {dtype} or {FP8}, not {key_cache.dtype}")
    if block_size % 16 != 0:
        raise ValueError(f"block size {block_size} is not a multiple of 16")
    kinds = [(cache.shape, cache.stride(), cache.dtype) for cache in (key_cache, value_cache)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"key_cache and value_cache differ in shape, strides or dtype: {kinds}")
    if key_cache.stride(3) != 1:
        raise ValueError("query, out and the caches must be contiguous in their last dimension")


def _check_numbers(window: int | None, scale: float) -> None:
    if window is not None and window < 0:
        raise ValueError(f"window must be None or >= 0, not {window}")
    if not scale > 0:
        raise ValueError(f"scale must be positive, not {scale}")


def _check_rows(
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    num_sink_tokens: torch.Tensor,
) -> None:
    num_seqs = seq_lens.shape[0]
    if cu_seqlens_q.shape != (num_seqs + 1,) or num_sink_tokens.shape != (num_seqs,):
        shapes = f"{tuple(cu_seqlens_q.shape)} and {tuple(num_sink_tokens.shape)}"
        raise ValueError(f"{num_seqs} sequences need cu_seqlens_q and num_sink_tokens to match, not {shapes}")
    if block_table.dim() != 2 or block_table.shape[0] < num_seqs or block_table.stride(1) != 1:
        expected = f"[{num_seqs} or more, max_blocks] with contiguous rows"
        raise ValueError(f"block_table must be {expected}, not {tuple(block_table.shape)}")
    for tensor in (cu_seqlens_q, seq_lens, block_table, num_sink_tokens):
        if tensor.dtype != torch.int32 or tensor.device != seq_lens.device:
            found = f"{tensor.dtype} on {tensor.device}"
            raise ValueError(f"indices and lengths must be int32 on {seq_lens.device}, not {found}")


def _check_queries(layer: Layer, step: Step, query: torch.Tensor, out: torch.Tensor) -> None:
    """Runs for every layer of every step outside CUDA graphs: messages are built on failure only."""
    shape = query.shape
    if shape[1:] != layer.row_shape or query.dtype != layer.dtype or shape[0] < step.num_tokens:
        expected = f"[{step.num_tokens} or more, {layer.num_heads}, {layer.head_size}] {layer.dtype}"
        raise ValueError(f"query must be {expected} to fit the cache, not {tuple(shape)} {query.dtype}")
    if out.shape != shape or out.dtype != query.dtype:
        raise ValueError(f"out must be {tuple(shape)} {query.dtype}, not {tuple(out.shape)} {out.dtype}")
    if query.stride(2) != 1 or out.stride(2) != 1:
        raise ValueError("query, out and the caches must be contiguous in their last dimension")
    rows, *held = step.scratch_shape
    if layer.config.split_decodes and (rows < step.num_seqs or tuple(held) != layer.scratch_shape):
        need = f"{step.num_seqs} of {layer.scratch_shape}"
        raise ValueError(
            f"scratch holds {rows} sequences of (heads, splits, size, KV heads) {tuple(held)}, not {need}"
        )
