"""The Triton kernel against the definition: interpreted on a CPU, compiled where there is a CUDA device.

`build` poisons every cache slot and block-table entry that must not be read, `launch` poisons outputs and
scratch, so each comparison is also a test of what the kernel leaves alone.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sink_window_checks import TOLERANCE, formula, launch, relative_error, take

from kernels.sink_window import Scratch, sink_window_attention
from kernels.sink_window.cases import CORRECTNESS, MIXED, Batch, Case, build
from kernels.sink_window.config import default_config
from kernels.sink_window.launcher import FP8, Layer, Step
from kernels.sink_window.launcher import launch as launch_layer

MIXED_CASE = Case("mixed", MIXED, 40, num_heads=6, num_kv_heads=2)


@pytest.mark.parametrize("case", CORRECTNESS, ids=lambda case: case.name)
def test_kernel_is_the_formula(case: Case, device: str) -> None:
    batch = build(case, seed=2, device=device)
    assert relative_error(launch(case, batch), formula(case, batch)) < TOLERANCE[case.dtype]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        seq_len = draw(st.integers(0, 150))
        query_len = draw(st.one_of(st.just(min(1, seq_len)), st.integers(0, min(seq_len, 40))))
        rows.append((seq_len, query_len, draw(st.integers(0, 70))))
    num_kv_heads = draw(st.sampled_from((1, 2)))
    dtype = draw(st.sampled_from((torch.bfloat16, torch.float16)))
    return Case(
        "drawn",
        tuple(rows),
        draw(st.one_of(st.none(), st.integers(1, 160))),
        num_heads=num_kv_heads * draw(st.sampled_from((1, 3, 7))),
        num_kv_heads=num_kv_heads,
        head_size=draw(st.sampled_from((64, 80))),
        block_size=draw(st.sampled_from((16, 32, 48))),
        dtype=dtype,
        kv_dtype=draw(st.sampled_from((None, FP8))),
    )


@settings(
    max_examples=30,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(case=cases(), seed=st.integers(0, 2**16))
def test_kernel_is_the_formula_on_drawn_cases(case: Case, seed: int, device: str) -> None:
    batch = build(case, seed, device)
    config = default_config(case.head_size, case.window)
    config = replace(config, num_splits=3)  # more than these windows would get
    assert relative_error(launch(case, batch, config), formula(case, batch)) < TOLERANCE[case.dtype]


def test_a_row_alone_equals_the_row_in_a_batch(device: str) -> None:
    batch = build(MIXED_CASE, seed=3, device=device)
    full = launch(MIXED_CASE, batch)
    for seq, row in enumerate(MIXED):
        start, stop = batch.cu_seqlens_q[seq : seq + 2].tolist()
        if start < stop:
            alone = launch(replace(MIXED_CASE, rows=(row,)), take(batch, seq))
            assert torch.equal(alone, full[start:stop]), f"sequence {seq}"


def test_rows_do_not_depend_on_how_a_prefill_is_chunked(device: str) -> None:
    case = Case("one prefill", ((100, 100, 5),), None)
    batch = build(case, seed=4, device=device)
    whole = launch(case, batch)
    half = replace(
        batch,
        query=batch.query[37:],
        cu_seqlens_q=torch.tensor([0, 63], dtype=torch.int32, device=device),
        max_query_len=63,
    )
    assert torch.equal(launch(case, half), whole[37:])


def test_poison_that_may_be_read_reaches_the_output(device: str) -> None:
    """The guard of the guards: with one visible slot poisoned, the other tests' comparisons would fail."""
    case = Case("one", ((50, 1, 4), (50, 1, 4)), 24)
    for position in (3, 26, 49):
        batch = build(case, seed=5, device=device)
        block = int(batch.block_table[1, position // 16])
        batch.value_cache[block, position % 16] = float("nan")
        out = launch(case, batch)
        assert out[1].isnan().all() and not out[0].isnan().any()


@pytest.mark.parametrize("window", (1, 40))
def test_scores_far_beyond_the_range_of_exp(window: int, device: str) -> None:
    """Scores of hundreds of either sign: maxima must be exact, also for a row that sees nothing at first."""
    case = replace(MIXED_CASE, window=window)
    batch = build(case, seed=10, device=device)
    batch.key_cache.mul_(64)
    batch = replace(batch, keys=[64 * keys for keys in batch.keys])
    config = replace(default_config(case.head_size, case.window), num_splits=3, split_align=16)
    assert relative_error(launch(case, batch, config), formula(case, batch)) < TOLERANCE[case.dtype]


def test_padding_rows_of_a_graph_are_left_alone(device: str) -> None:
    """A CUDA graph captured for more sequences runs with empty ones behind: no length, no query."""
    case = Case("padded", ((60, 1, 4), (0, 0, 0), (0, 0, 0)), 24)
    batch = build(case, seed=6, device=device)
    padded = replace(batch, query=torch.cat([batch.query, torch.full_like(batch.query, float("nan"))]))
    out = launch(case, padded)
    assert relative_error(out[:1], formula(case, batch)) < TOLERANCE[case.dtype]
    assert out[1:].isnan().all()


@pytest.mark.parametrize(
    "rows", [((60, 1, 4), (90, 33, 17), (150, 1, 0)), ((60, 1, 4), (7, 1, 9)), ((300, 64, 5),)], ids=str
)
def test_a_step_laid_out_for_a_graph_serves_any_batch_that_fits(
    rows: tuple[tuple[int, int, int], ...], device: str
) -> None:
    """What a CUDA graph fixes of a launch: 64 tokens, 5 rows, and that there may be chunks."""
    case = Case("replayed", rows, 24)
    batch = build(case, seed=13, device=device)
    layer = Layer(batch.key_cache, batch.value_cache, case.num_heads, case.dtype, case.window, batch.scale)
    scratch = Scratch.allocate(8, case.num_heads, case.num_kv_heads, case.head_size, case.window, device)
    starts = batch.cu_seqlens_q.new_full((6,), int(batch.cu_seqlens_q[-1]))
    lengths, sinks = batch.seq_lens.new_zeros(5), batch.num_sink_tokens.new_zeros(5)
    table = batch.block_table.new_full((5, batch.block_table.shape[1]), 2**31 - 1)
    for whole, part in (
        (starts, batch.cu_seqlens_q),
        (lengths, batch.seq_lens),
        (sinks, batch.num_sink_tokens),
        (table, batch.block_table),
    ):
        whole[: len(part)] = part
    query = torch.full((64, *batch.query.shape[1:]), float("nan"), dtype=case.dtype, device=device)
    query[: len(batch.query)] = batch.query
    out = torch.full_like(query, float("nan"))
    launch_layer(layer, Step(64, 64, starts, lengths, table, sinks, scratch), query, out)
    real = len(batch.query)
    assert torch.equal(out[:real], launch(case, batch)) and out[real:].isnan().all()


def test_a_query_that_sees_nothing_gets_zeros(device: str) -> None:
    case = Case("empty", ((0, 0, 0), (5, 1, 0)), 24)
    batch = build(case, seed=7, device=device)
    lengths = torch.tensor([0, 5], dtype=torch.int32, device=device)
    batch = replace(
        batch,
        query=batch.query.repeat(3, 1, 1),
        cu_seqlens_q=torch.tensor([0, 1, 3], dtype=torch.int32, device=device),
        seq_lens=lengths - torch.tensor([0, 4], dtype=torch.int32, device=device),
        max_query_len=2,
        block_table=batch.block_table[[0, 1]],
    )
    # Sequence 0 has a query and no position; sequence 1 has two queries and one position, the second's.
    batch.key_cache[batch.block_table[1, 0].long(), 0] = 1.0
    batch.value_cache[batch.block_table[1, 0].long(), 0] = 2.0
    out = launch(case, batch)
    assert (out[:2] == 0).all() and (out[2] == 2).all()


def test_strided_views_and_other_layouts(device: str) -> None:
    """A cache with heads outside of slots, and queries and outputs cut from a fused projection."""
    batch = build(MIXED_CASE, seed=8, device=device)
    expected = launch(MIXED_CASE, batch)
    cache = (
        torch.cat([batch.key_cache, batch.value_cache], dim=-1).transpose(1, 2).contiguous().transpose(1, 2)
    )
    fused = torch.cat([batch.query, batch.query], dim=1)
    other = replace(
        batch,
        key_cache=cache[..., : MIXED_CASE.head_size],
        value_cache=cache[..., MIXED_CASE.head_size :],
        query=fused[:, : MIXED_CASE.num_heads],
    )
    assert torch.equal(launch(MIXED_CASE, other), expected)


def arguments(batch: Batch, case: Case) -> dict:
    scratch = Scratch.allocate(len(case.rows), case.num_heads, case.num_kv_heads, case.head_size, 40, "cpu")
    return {
        "query": batch.query,
        "key_cache": batch.key_cache,
        "value_cache": batch.value_cache,
        "cu_seqlens_q": batch.cu_seqlens_q,
        "max_query_len": batch.max_query_len,
        "seq_lens": batch.seq_lens,
        "block_table": batch.block_table,
        "num_sink_tokens": batch.num_sink_tokens,
        "window": 40,
        "scale": batch.scale,
        "out": torch.empty_like(batch.query),
        "scratch": scratch,
    }


WRONG = {
    "query must be bf": lambda a: {"query": a["query"].float()},
    "query must be .147 or more, 6, 64": lambda a: {"query": a["query"][..., :48], "out": a["out"][..., :48]},
    "head size 48": lambda a: {
        "key_cache": a["key_cache"][..., :48],
        "value_cache": a["value_cache"][..., :48],
    },
    "out must be": lambda a: {"out": a["out"].float()},
    "do not fit": lambda a: {"query": a["query"][:, :5], "out": a["out"][:, :5]},
    "the cache must be": lambda a: {
        "key_cache": a["key_cache"].float(),
        "value_cache": a["value_cache"].float(),
    },
    "block size 8": lambda a: {"key_cache": a["key_cache"][:, :8], "value_cache": a["value_cache"][:, :8]},
    "differ in shape": lambda a: {"value_cache": a["value_cache"].contiguous()},
    "contiguous in their last": lambda a: {"query": a["query"].mT.contiguous().mT},
    "sequences need": lambda a: {"num_sink_tokens": a["num_sink_tokens"][:-1]},
    "block_table must be": lambda a: {"block_table": a["block_table"][:-1]},
    "must be int32": lambda a: {"seq_lens": a["seq_lens"].long()},
    "window must be": lambda a: {"window": -1},
    "scale must be positive": lambda a: {"scale": 0.0},
    "scratch holds": lambda a: {"scratch": Scratch.allocate(2, 6, 2, 64, 40, "cpu")},
    "an fp8 cache needs": lambda a: {
        "key_cache": a["key_cache"].to(FP8),
        "value_cache": a["value_cache"].to(FP8),
        "k_scale": torch.ones(1),
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_named(message: str) -> None:
    good = arguments(build(MIXED_CASE, seed=9), MIXED_CASE)
    with pytest.raises(ValueError, match=message):
        sink_window_attention(**good | WRONG[message](good))
