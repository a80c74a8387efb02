"""vLLM's CPU kernel over a compacted table, against the kernel folder's reference with the rounded mask.

Whatever must not be read holds NaN: blocks that were freed, block 0, blocks of nobody, and the rest of each
cache. Block-table entries in the gap are stale: ids of NaN blocks.
"""

from __future__ import annotations

import itertools
import random
from typing import Any, NamedTuple

import pytest
import torch

from engine.vllm.sink_window.layout import gap_blocks
from kernels.sink_window.reference import sink_window_attention_reference

pytestmark = pytest.mark.vllm

HEADS, KV_HEADS, HEAD_SIZE = 6, 2, 64


class Row(NamedTuple):
    done: int  # tokens before this step
    new: int  # tokens of this step
    sinks: int


class Batch(NamedTuple):
    common: Any  # vLLM's CommonAttentionMetadata
    query: torch.Tensor  # [num_tokens, HEADS, HEAD_SIZE]
    keys: torch.Tensor  # plain [num_blocks, block_size, KV_HEADS, HEAD_SIZE]
    values: torch.Tensor
    key_cache: torch.Tensor  # the same, as vLLM's kernel keeps it
    value_cache: torch.Tensor
    isa: str


def build(rows: list[Row], window: int, block_size: int, dtype: torch.dtype, seed: int) -> Batch:
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backend import CommonAttentionMetadata
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    generator = torch.Generator().manual_seed(seed)
    lengths = [row.done + row.new for row in rows]
    width = max(-(-length // block_size) for length in lengths) + 2
    needed = [-(-length // block_size) for length in lengths]
    num_blocks = 2 * sum(needed) + 4
    ids = iter((torch.randperm(num_blocks - 1, generator=generator) + 1).tolist())
    table = torch.zeros((len(rows), width), dtype=torch.int32)
    keys = torch.full((num_blocks, block_size, KV_HEADS, HEAD_SIZE), float("nan"), dtype=dtype)
    values = keys.clone()
    cache = torch.full((num_blocks, KV_HEADS, 2 * block_size, HEAD_SIZE), float("nan"), dtype=dtype)
    key_cache, value_cache = cache.chunk(2, dim=2)
    isa = _get_attn_isa(dtype, block_size, HEAD_SIZE)
    for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        first, last = gap_blocks(row.sinks, row.done, window, block_size)
        for block in range(width):
            table[index, block] = next(ids) if block < needed[index] else 0
            if block >= needed[index] or first <= block < last:
                continue
            block_id = int(table[index, block])
            fill = min(block_size, length - block * block_size)
            key, value = torch.randn((2, block_size, KV_HEADS, HEAD_SIZE), generator=generator).to(dtype)
            slots = torch.arange(block_size) + block_id * block_size
            # The whole block is written: what lies behind a session's last token is vLLM's own affair.
            ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, isa)
            keys[block_id, :fill], values[block_id, :fill] = key[:fill], value[:fill]
    starts = torch.tensor([0, *itertools.accumulate(row.new for row in rows)], dtype=torch.int32)
    num_tokens = int(starts[-1])
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        num_reqs=len(rows),
        num_actual_tokens=num_tokens,
        max_query_len=max(row.new for row in rows),
        max_seq_len=max(lengths),
        block_table_tensor=table,
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
    )
    query = torch.randn((num_tokens, HEADS, HEAD_SIZE), generator=generator).to(dtype)
    return Batch(common, query, keys, values, key_cache, value_cache, isa)


def attend(batch: Batch, common: Any) -> torch.Tensor:
    """What vLLM's backend does with the metadata of `common`."""
    from vllm import _custom_ops as ops

    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=common.num_reqs,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        seq_lens=common.seq_lens,
        dtype=batch.query.dtype,
        query_start_loc=common.query_start_loc,
        causal=True,
        sliding_window_size=-1,
        isa=batch.isa,
        enable_kv_split=True,
    )
    out = torch.full_like(batch.query, float("nan"))
    ops.cpu_attention_with_kv_cache(
        query=batch.query,
        key_cache=batch.key_cache,
        value_cache=batch.value_cache,
        output=out,
        query_start_loc=common.query_start_loc,
        seq_lens=common.seq_lens,
        scale=HEAD_SIZE**-0.5,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=common.block_table_tensor,
        softcap=0.0,
        scheduler_metadata=plan,
        s_aux=None,
    )
    return out


def expected(batch: Batch, rows: list[Row], window: int, block_size: int) -> torch.Tensor:
    """The reference, one query at a time: each sees its sinks and back to where its chunk's first does."""
    outs = []
    for index, row in enumerate(rows):
        first, last = gap_blocks(row.sinks, row.done, window, block_size)
        start = int(batch.common.query_start_loc[index])
        for number in range(row.new):
            position = row.done + number
            outs.append(
                sink_window_attention_reference(
                    batch.query[start + number][None],
                    batch.keys,
                    batch.values,
                    torch.tensor([0, 1], dtype=torch.int32),
                    torch.tensor([position + 1], dtype=torch.int32),
                    batch.common.block_table_tensor[index][None],
                    torch.tensor([first * block_size], dtype=torch.int32),
                    position + 1 - last * block_size,
                    HEAD_SIZE**-0.5,
                )
            )
    return torch.cat(outs)


W = 40
DONE = (0, 1, 38, 39, 40, 55, 56, 57, 71, 72, 87, 300)
CASES = {
    "edges": [(done, 1, sinks) for done in DONE for sinks in (0, 1, 16)],
    "chunks": [(0, 30, 5), (0, 90, 5), (100, 21, 0), (200, 64, 17), (55, 17, 40), (39, 3, 1)],
    "mixed": [(300, 1, 16), (10, 1, 16), (120, 33, 7), (0, 1, 0), (250, 2, 250), (63, 1, 64)],
}


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_it_equals_the_reference_with_the_rounded_mask(name, dtype, block_size):
    check([Row(*row) for row in CASES[name]], W, block_size, dtype, seed=1)


@pytest.mark.parametrize("seed", range(8))
def test_random_batches(seed):
    rng = random.Random(seed)
    rows = [
        Row(rng.choice([0, rng.randint(0, 400)]), rng.choice([1, 1, rng.randint(1, 40)]), rng.randint(0, 70))
        for _ in range(rng.randint(1, 6))
    ]
    check(rows, rng.choice([1, 16, 17, 100]), rng.choice([16, 32, 128]), torch.float32, seed)


def check(rows: list[Row], window: int, block_size: int, dtype: torch.dtype, seed: int) -> None:
    from engine.vllm.sink_window.cpu import compact

    batch = build(rows, window, block_size, dtype, seed)
    sinks = torch.tensor([row.sinks for row in rows], dtype=torch.int32)
    out = attend(batch, compact(batch.common, sinks, window, block_size))
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    reference = expected(batch, rows, window, block_size)
    torch.testing.assert_close(out.double(), reference, atol=tolerance, rtol=tolerance)


def test_the_mask_is_rounded_outward_by_less_than_a_block_and_a_chunk():
    """Never inward: every token of [0, S) and [t - W + 1, t] of every query stays."""
    rng = random.Random(0)
    for _ in range(2000):
        block_size, window = rng.choice([16, 32]), rng.randint(1, 200)
        sinks, done, new = rng.randint(0, 80), rng.randint(0, 600), rng.randint(1, 60)
        first, last = gap_blocks(sinks, done, window, block_size)
        if first >= last:
            continue
        assert 0 <= first * block_size - sinks < block_size
        for position in (done, done + new - 1):
            assert 0 <= position - window + 1 - last * block_size < block_size + new


def test_a_batch_without_gaps_is_left_as_it_is():
    from engine.vllm.sink_window.cpu import compact

    rows = [Row(0, 5, 3), Row(39, 1, 0), Row(60, 1, 64)]
    batch = build(rows, W, 16, torch.float32, 0)
    assert compact(batch.common, torch.tensor([3, 0, 64], dtype=torch.int32), W, 16) is batch.common
