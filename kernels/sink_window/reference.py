"""Sink-window attention in plain torch: what the kernel must compute.

A query at absolute position t of its sequence sees the keys [0, S) and [t - W + 1, t], nothing after t.
S is the sequence's number of sink tokens, W the window; the window counts the query's own token.
"""

from __future__ import annotations

from itertools import pairwise

import torch


def visible_mask(
    query_positions: torch.Tensor, key_positions: torch.Tensor, num_sink_tokens: int, window: int | None
) -> torch.Tensor:
    """Which keys each query sees.

    query_positions [Q] and key_positions [K] are absolute int64 positions in one sequence; `window` is in
    tokens, None or 0 for unlimited. Returns bool [Q, K].
    """
    query, key = query_positions[:, None], key_positions[None, :]
    causal = key <= query
    if not window:
        return causal
    return causal & ((key < num_sink_tokens) | (key > query - window))


def gather_visible(
    cache: torch.Tensor, block_row: torch.Tensor, positions: torch.Tensor, scale: float
) -> torch.Tensor:
    """Rows of a paged cache, in float64: [K, num_kv_heads, head_size].

    cache is [num_blocks, block_size, num_kv_heads, head_size], block_row [max_blocks] the sequence's block
    ids, positions [K] the absolute positions to fetch. Only the blocks of `positions` are looked up.
    """
    block_size = cache.shape[1]
    blocks = block_row[positions // block_size].long()
    # Cast first: advanced indexing of fp8 is not implemented on every device.
    flat = torch.stack([cache[b, o] for b, o in zip(blocks, positions % block_size, strict=True)])
    return flat.to(torch.float64) * scale


def sink_window_attention_reference(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    num_sink_tokens: torch.Tensor,
    window: int | None,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Attention of every query row over the keys it sees, in float64: [num_tokens, num_heads, head_size].

    Arguments as for `sink_window_attention`. Rows past cu_seqlens_q[-1] belong to no sequence and come back
    as NaN; a query that sees nothing (a sequence shorter than its queries) comes back as zeros.
    """
    num_tokens, num_heads, head_size = query.shape
    group = num_heads // key_cache.shape[2]
    out = torch.full(
        (num_tokens, num_heads, head_size), float("nan"), dtype=torch.float64, device=query.device
    )
    starts = cu_seqlens_q.tolist()
    for seq, (start, stop) in enumerate(pairwise(starts)):
        if start == stop:
            continue
        seq_len, sinks = int(seq_lens[seq]), int(num_sink_tokens[seq])
        positions = torch.arange(seq_len - (stop - start), seq_len, device=query.device)
        keys = torch.arange(seq_len, device=query.device)
        mask = visible_mask(positions, keys, sinks, window)
        keys, mask = keys[mask.any(dim=0)], mask[:, mask.any(dim=0)]
        if len(keys) == 0:
            out[start:stop] = 0.0
            continue
        k = gather_visible(key_cache, block_table[seq], keys, k_scale).repeat_interleave(group, dim=1)
        v = gather_visible(value_cache, block_table[seq], keys, v_scale).repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query[start:stop].to(torch.float64), k) * scale
        scores = scores.masked_fill(~mask, float("-inf"))
        # A query with no visible key has only -inf scores: softmax gives NaN, the contract says zeros.
        weights = (
            torch.softmax(scores, dim=-1).nan_to_num(0.0) if not mask.any(1).all() else scores.softmax(-1)
        )
        out[start:stop] = torch.einsum("hqk,khd->qhd", weights, v)
    return out
