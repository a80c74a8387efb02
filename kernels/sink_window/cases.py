"""Shapes that the tests and the benchmark share, and the paged inputs built from them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernels.sink_window.launcher import FP8


@dataclass(frozen=True)
class Case:
    """One batch. `rows` is one (seq_len, query_len, num_sink_tokens) per sequence, all in tokens."""

    name: str
    rows: tuple[tuple[int, int, int], ...]
    window: int | None
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None  # None: as dtype


@dataclass(frozen=True)
class Batch:
    """A case's tensors, and the same data without pages: for each sequence the positions that its queries see
    (int64 [n]) and what is there (float32 [n, num_kv_heads, head_size], before the fp8 scales)."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    num_sink_tokens: torch.Tensor
    max_query_len: int
    scale: float
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    positions: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]


W = 24
EDGES = tuple(  # exact window edges around W and the tile sizes, and sequences shorter than their sinks
    (length, 1, sinks)
    for length in (1, 2, W - 1, W, W + 1, W + 7, W + 8, W + 9, 63, 64, 65, 130)
    for sinks in (0, 1, 7, 40)
)
MIXED = (
    (1, 1, 4),
    (40, 40, 4),
    (5, 0, 4),
    (133, 21, 17),
    (90, 1, 16),
    (0, 0, 0),
    (200, 65, 0),
    (33, 2, 100),
    (16, 16, 1),
    (77, 1, 0),
)
CORRECTNESS = (
    Case("edges", EDGES, W),
    Case("mixed", MIXED, W),
    Case("mixed-unlimited", MIXED, None),
    Case("window-1", MIXED, 1),
    Case("group-7", MIXED, 40, num_heads=14, num_kv_heads=2),
    Case("group-1", MIXED, 40, num_heads=2, num_kv_heads=2),
    Case("group-16", MIXED[:5], 40, num_heads=16, num_kv_heads=1),
    Case("head-80", MIXED, 40, head_size=80, block_size=32),
    Case("head-96", MIXED, 40, head_size=96, block_size=48),
    Case("head-128", MIXED, 40, head_size=128, block_size=128),
    Case("head-256", MIXED[:5], 40, head_size=256, block_size=64),
    Case("300 sequences", ((0, 0, 0),) * 280 + ((1, 1, 0), (9, 2, 1)) * 10, 4, num_heads=1, num_kv_heads=1),
    Case("fp16", MIXED, 40, dtype=torch.float16),
    Case("fp8", MIXED, 40, kv_dtype=FP8),
    Case("fp8-fp16", MIXED[:5], 40, dtype=torch.float16, kv_dtype=FP8),
)

# Named before tuning: issue 3's primary shape, Qwen2.5-7B's heads.
PRIMARY = Case(
    "primary", ((4096, 1, 16),) * 256, 1024, num_heads=28, num_kv_heads=4, head_size=128, block_size=16
)


def decodes(batch: int, seq_len: int, num_sink_tokens: int = 16, heads: tuple[int, int] = (28, 4)) -> Case:
    """A batch of decodes at one length, otherwise the primary shape."""
    rows = ((seq_len, 1, num_sink_tokens),) * batch
    return replace(
        PRIMARY,
        name=f"decode {batch} x {seq_len}, S={num_sink_tokens}, {heads[0]}/{heads[1]} heads",
        rows=rows,
        num_heads=heads[0],
        num_kv_heads=heads[1],
    )


def chunks(num_decodes: int, num_chunks: int, seq_len: int, num_sink_tokens: int = 16) -> Case:
    """Decodes beside prefill chunks of 64 tokens, otherwise the primary shape."""
    rows = ((seq_len, 1, num_sink_tokens),) * num_decodes + ((seq_len, 64, num_sink_tokens),) * num_chunks
    return replace(PRIMARY, name=f"mixed {num_decodes} decodes + {num_chunks} x 64 at {seq_len}", rows=rows)


def build(case: Case, seed: int = 0, device: str = "cpu") -> Batch:
    """Random inputs for a case, on shuffled blocks, with everything that must not be read poisoned.

    Cache slots that no query of their sequence sees hold NaN or Inf. Block-table entries without a visible
    key hold stale ids: blocks of other sequences, the null block, or numbers far outside the cache. The cache
    is laid out as vLLM's on CUDA: the last dimension holds a slot's key and value side by side.
    """
    rng = torch.Generator().manual_seed(seed)
    heads, size, bs = case.num_kv_heads, case.head_size, case.block_size
    kv_dtype = case.kv_dtype or case.dtype
    positions = [visible_positions(row, case.window) for row in case.rows]
    used = [torch.unique(p // bs) for p in positions]
    max_blocks = max((length + bs - 1) // bs for length, _, _ in case.rows) + 1
    num_blocks = sum(map(len, used)) + 3
    shuffled = (torch.randperm(num_blocks - 1, generator=rng) + 1).to(torch.int32)
    stale = torch.tensor([0, 1, num_blocks - 1, num_blocks + 5, -1, 2**31 - 1, -(2**31)], dtype=torch.int32)
    table = stale[torch.randint(len(stale), (len(case.rows), max_blocks), generator=rng)]
    cache = torch.full((num_blocks, bs, heads, 2 * size), float("nan"), dtype=case.dtype)
    if kv_dtype != FP8:  # e4m3 has no Inf
        cache[::2] = float("inf")
    cache = cache.to(kv_dtype)
    keys, values, taken = [], [], 0
    for row, (seen, blocks) in enumerate(zip(positions, used, strict=True)):
        table[row, blocks] = shuffled[taken : taken + len(blocks)]
        taken += len(blocks)
        data = torch.randn((len(seen), heads, 2 * size), generator=rng).to(kv_dtype)
        # index_put_ knows no fp8, so copy bytes.
        raw, raw_data = cache.view(torch.uint8), data.view(torch.uint8)
        raw[table[row, seen // bs].long(), seen % bs] = raw_data
        keys.append(data[..., :size].float())
        values.append(data[..., size:].float())
    query_lens = torch.tensor([0] + [query_len for _, query_len, _ in case.rows])
    cu_seqlens_q = query_lens.cumsum(0).to(torch.int32)
    query = torch.randn((int(cu_seqlens_q[-1]), case.num_heads, size), generator=rng).to(case.dtype)
    cache = cache.to(device)
    return Batch(
        query=query.to(device),
        key_cache=cache[..., :size],
        value_cache=cache[..., size:],
        cu_seqlens_q=cu_seqlens_q.to(device),
        seq_lens=torch.tensor([length for length, _, _ in case.rows], dtype=torch.int32, device=device),
        block_table=table.to(device),
        num_sink_tokens=torch.tensor([sinks for _, _, sinks in case.rows], dtype=torch.int32, device=device),
        max_query_len=max(query_len for _, query_len, _ in case.rows),
        scale=size**-0.5,
        k_scale=torch.tensor([0.75], device=device),
        v_scale=torch.tensor([1.5], device=device),
        positions=positions,
        keys=keys,
        values=values,
    )


def visible_positions(row: tuple[int, int, int], window: int | None) -> torch.Tensor:
    """Positions that some query of a row (seq_len, query_len, num_sink_tokens) sees, ascending int64."""
    length, query_len, sinks = row
    if query_len == 0:
        return torch.arange(0)
    position = torch.arange(length)
    first = length - query_len - window + 1 if window else 0
    return position[(position < sinks) | (position >= first)]
