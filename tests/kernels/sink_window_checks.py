"""What the sink-window tests share: an independent formula, a poisoned launch, an error measure."""

from dataclasses import replace

import numpy as np
import torch

from kernels.sink_window import (
    Config,
    Scratch,
    sink_window_attention,
    sink_window_attention_reference,
)
from kernels.sink_window.cases import Batch, Case
from kernels.sink_window.launcher import FP8, default_config

# Relative errors |out - ref| / |ref| of one rounding of weights and outputs to the query's type.
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4}


def formula(case: Case, batch: Batch) -> torch.Tensor:
    """float64 attention from the definition, one query and its set of positions at a time.

    Uses the case's dense keys in numpy, so it knows neither pages nor tiles, and nothing of `reference.py`.
    """
    fp8 = batch.key_cache.dtype == FP8
    k_scale, v_scale = (float(batch.k_scale), float(batch.v_scale)) if fp8 else (1.0, 1.0)
    query = batch.query.double().cpu().numpy()
    group = case.num_heads // case.num_kv_heads
    query = query.reshape(-1, case.num_kv_heads, group, case.head_size)
    out = np.zeros_like(query)
    token = 0
    for seq, (seq_len, query_len, sinks) in enumerate(case.rows):
        where = {int(position): index for index, position in enumerate(batch.positions[seq])}
        keys = batch.keys[seq].double().numpy() * k_scale
        values = batch.values[seq].double().numpy() * v_scale
        for t in range(seq_len - query_len, seq_len):
            first = max(0, t - case.window + 1) if case.window else 0
            seen = sorted(set(range(min(sinks, t + 1))) | set(range(first, t + 1)))
            rows = [where[position] for position in seen]
            scores = np.einsum("hgd,nhd->hgn", query[token], keys[rows]) / np.sqrt(case.head_size)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            out[token] = np.einsum("hgn,nhd->hgd", weights, values[rows])
            token += 1
    return torch.from_numpy(out.reshape(batch.query.shape))


def reference(case: Case, batch: Batch) -> torch.Tensor:
    """`reference.py`'s output for a batch, float64."""
    fp8 = batch.key_cache.dtype == FP8
    return sink_window_attention_reference(
        batch.query,
        batch.key_cache,
        batch.value_cache,
        batch.cu_seqlens_q,
        batch.seq_lens,
        batch.block_table,
        batch.num_sink_tokens,
        case.window,
        batch.scale,
        float(batch.k_scale) if fp8 else 1.0,
        float(batch.v_scale) if fp8 else 1.0,
    )


def launch(case: Case, batch: Batch, config: Config | None = None) -> torch.Tensor:
    """The kernel's output for a batch, written over NaN. Also checks that the scratch is left reusable."""
    config = config or default_config(case.head_size, case.window)
    out = torch.full_like(batch.query, float("nan"))
    scratch = Scratch.allocate(
        max_num_seqs=len(case.rows) + 1,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_size=case.head_size,
        window=case.window,
        device=out.device,
        splits=config.num_splits,
    )
    for poisoned in (scratch.partial, scratch.partial_max, scratch.partial_sum):
        poisoned.fill_(float("nan"))
    sink_window_attention(
        query=batch.query,
        key_cache=batch.key_cache,
        value_cache=batch.value_cache,
        cu_seqlens_q=batch.cu_seqlens_q,
        max_query_len=batch.max_query_len,
        seq_lens=batch.seq_lens,
        block_table=batch.block_table,
        num_sink_tokens=batch.num_sink_tokens,
        window=case.window,
        scale=batch.scale,
        out=out,
        scratch=scratch,
        k_scale=batch.k_scale,
        v_scale=batch.v_scale,
        config=config,
    )
    assert not scratch.arrived.any()
    return out


def take(batch: Batch, seq: int) -> Batch:
    """One sequence of a batch as a batch of its own, on the same cache."""
    start, stop = batch.cu_seqlens_q[seq : seq + 2].tolist()
    return replace(
        batch,
        query=batch.query[start:stop].clone(),
        cu_seqlens_q=torch.tensor([0, stop - start], dtype=torch.int32, device=batch.query.device),
        max_query_len=stop - start,
        seq_lens=batch.seq_lens[seq : seq + 1].clone(),
        block_table=batch.block_table[seq : seq + 1].clone(),
        num_sink_tokens=batch.num_sink_tokens[seq : seq + 1].clone(),
    )


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """|out - expected| / |expected|; NaN anywhere gives NaN, which passes no comparison."""
    out, expected = out.double().cpu(), expected.double().cpu()
    return float((out - expected).norm() / expected.norm()) if expected.norm() > 0 else float(out.norm())
