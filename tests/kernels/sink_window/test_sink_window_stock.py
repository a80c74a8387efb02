"""With S = 0 the kernel is vLLM's stock Triton kernel: to the bit on its tile schedule, closely on ours."""

from dataclasses import replace

import pytest
import torch
from sink_window_checks import launch, relative_error
from triton_interpreter import interpret

from bench.sink_window_stock import stock_triton, vllm_folder
from kernels.sink_window import Config
from kernels.sink_window.cases import EDGES, MIXED, Batch, Case, build

pytestmark = [
    pytest.mark.skipif(vllm_folder() is None, reason="vLLM's files are not installed"),
    # The stock kernel divides 0 by 0 in the rows that pad its programs.
    pytest.mark.filterwarnings("ignore:invalid value encountered in divide"),
]

# The stock kernel's schedule: 16 rows, 32 keys aligned to absolute positions, no splits, scale before exp.
STOCK = Config(
    num_splits=1,
    decode_tile=64,
    block_m=16,
    mixed_tile=32,
    split_decodes=False,
    stock_rounding=True,
)
# Two roundings of bf16 weights and outputs, each within half of the kernel's tolerance against the formula.
OURS_AGAINST_STOCK = 4e-3


def stock(batch: Batch, window: int | None) -> torch.Tensor:
    module = stock_triton()
    if batch.query.device.type == "cpu":
        interpret(module, module.helpers)
    out = torch.full_like(batch.query, float("nan"))
    module.unified_attention(
        q=batch.query,
        k=batch.key_cache,
        v=batch.value_cache,
        out=out,
        cu_seqlens_q=batch.cu_seqlens_q,
        max_seqlen_q=batch.max_query_len,
        seqused_k=batch.seq_lens,
        max_seqlen_k=int(batch.seq_lens.max()),
        softmax_scale=batch.scale,
        causal=True,
        window_size=(window - 1, 0) if window else (-1, -1),
        block_table=batch.block_table,
        softcap=0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
    )
    return out


def readable(batch: Batch) -> Batch:
    """The stock kernel reads the whole first tile of a window: give it valid entries, finite slots."""
    return replace(
        batch,
        block_table=batch.block_table.clamp(0, batch.key_cache.shape[0] - 1),
        key_cache=batch.key_cache.nan_to_num(0.0, 0.0, 0.0),
        value_cache=batch.value_cache.nan_to_num(0.0, 0.0, 0.0),
    )


def without_sinks(rows: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, int, int], ...]:
    return tuple((seq_len, query_len, 0) for seq_len, query_len, _ in rows)


CASES = [
    Case("edges", without_sinks(EDGES[::4]), 24),
    Case("mixed", without_sinks(MIXED), 40, num_heads=7, num_kv_heads=1),
    Case("mixed, unlimited", without_sinks(MIXED), None, head_size=80),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_without_sinks_it_is_the_stock_kernel(case: Case, device: str) -> None:
    batch = readable(build(case, seed=11, device=device))
    expected = stock(batch, case.window)
    assert torch.equal(launch(case, batch, STOCK), expected)
    assert relative_error(launch(case, batch), expected) < OURS_AGAINST_STOCK


def test_the_one_row_where_the_stock_kernel_rounds_differently(device: str) -> None:
    """A row that sees nothing of its first tile and whose scores are all negative: the stock kernel goes on
    with a maximum of 0 (and loses the row if the scores are below exp's range), ours with the true one."""
    case = Case("window 1", without_sinks(MIXED), 1)
    batch = readable(build(case, seed=12, device=device))
    expected, out = stock(batch, case.window), launch(case, batch, STOCK)
    assert not torch.equal(out, expected)
    assert relative_error(out, expected) < OURS_AGAINST_STOCK
