"""The kernel at real sizes on a CUDA device: against the reference, bit for bit across batches, in graphs."""

from dataclasses import replace

import pytest
import torch
from sink_window_checks import TOLERANCE, launch, reference, relative_error, take

from kernels.sink_window import Scratch, sink_window_attention
from kernels.sink_window.cases import PRIMARY, Case, build
from kernels.sink_window.launcher import FP8, Layer, Step
from kernels.sink_window.launcher import launch as launch_layer

pytestmark = pytest.mark.gpu

ROWS = (
    *((length, 1, 16) for length in (1, 15, 16, 17, 1023, 1024, 1025, 1040, 1041, 4096, 65536)),
    *((4097 + 31 * sinks, 1, sinks) for sinks in (0, 1, 7, 42, 256)),
    (64, 64, 16),
    (1100, 64, 16),
    (4096, 64, 16),
    (65000, 50, 33),
    (2048, 2048, 16),
    (900, 900, 1000),
)
SHAPES = [
    replace(PRIMARY, name="28/4 heads of 128", rows=ROWS),
    replace(PRIMARY, name="32/8 heads of 128", rows=ROWS, num_heads=32, num_kv_heads=8),
    replace(
        PRIMARY,
        name="16/2 heads of 256, block 64",
        rows=ROWS,
        num_heads=16,
        num_kv_heads=2,
        head_size=256,
        block_size=64,
    ),
    replace(PRIMARY, name="9/3 heads of 64", rows=ROWS, num_heads=9, num_kv_heads=3, head_size=64),
    replace(PRIMARY, name="fp8", rows=ROWS, kv_dtype=FP8),
    replace(PRIMARY, name="fp16, block 128", rows=ROWS, dtype=torch.float16, block_size=128),
    replace(PRIMARY, name="unlimited", rows=ROWS[:11], window=None),
]


@pytest.mark.parametrize("case", SHAPES, ids=lambda case: case.name)
def test_real_sizes(case: Case) -> None:
    batch = build(case, seed=21, device="cuda")
    out, expected = launch(case, batch), reference(case, batch)
    for seq, row in enumerate(case.rows):
        start, stop = batch.cu_seqlens_q[seq : seq + 2].tolist()
        assert relative_error(out[start:stop], expected[start:stop]) < TOLERANCE[case.dtype], row


def test_a_row_alone_equals_the_row_in_a_full_batch() -> None:
    case = replace(PRIMARY, rows=tuple((1 + 29 * i, 1, i % 40) for i in range(236)) + ROWS)
    batch = build(case, seed=22, device="cuda")
    full = launch(case, batch)
    assert torch.equal(launch(case, batch), full)  # and again, whoever arrives last
    for seq in (*range(0, 236, 9), *range(236, len(case.rows))):
        start, stop = batch.cu_seqlens_q[seq : seq + 2].tolist()
        alone = launch(replace(case, rows=(case.rows[seq],)), take(batch, seq))
        assert torch.equal(alone, full[start:stop]), case.rows[seq]


def test_one_graph_serves_changing_lengths() -> None:
    """Capture once, then replay with other lengths, sinks, tables and queries in the same tensors."""
    short = replace(PRIMARY, rows=((1, 1, 0),) * 20)
    long = replace(PRIMARY, rows=tuple((500 + 211 * i, 1, i) for i in range(18)) + ((0, 0, 0),) * 2)
    after = build(long, seed=23, device="cuda")
    before = build(short, seed=24, device="cuda")
    live = replace(
        after,
        query=torch.cat([after.query, after.query[:2]]),
        seq_lens=before.seq_lens.clone(),
        cu_seqlens_q=before.cu_seqlens_q.clone(),
        num_sink_tokens=before.num_sink_tokens.clone(),
        block_table=torch.ones_like(after.block_table),
    )
    out = torch.empty_like(live.query)
    scratch = Scratch.allocate(32, 28, 4, 128, PRIMARY.window, "cuda")

    def run() -> None:
        sink_window_attention(
            live.query,
            live.key_cache,
            live.value_cache,
            live.cu_seqlens_q,
            1,
            live.seq_lens,
            live.block_table,
            live.num_sink_tokens,
            PRIMARY.window,
            live.scale,
            out,
            scratch,
        )

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for name in ("seq_lens", "cu_seqlens_q", "num_sink_tokens", "block_table"):
        getattr(live, name).copy_(getattr(after, name))
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out[:18], launch(long, after))
    assert out[18:].isnan().all()


def test_one_graph_serves_decodes_and_chunks() -> None:
    """A graph of 256 tokens and 40 rows, replayed for batches of other shapes, padded with empty rows."""
    batches = [
        replace(PRIMARY, rows=tuple((900 + 211 * i, 1, i) for i in range(40))),
        replace(
            PRIMARY, rows=(*tuple((900 + 97 * i, 1, i) for i in range(21)), (5000, 50, 7), (180, 180, 9))
        ),
        replace(PRIMARY, rows=((4000, 256, 16),)),
    ]
    built = [build(case, seed=26 + i, device="cuda") for i, case in enumerate(batches)]
    blocks = max(len(batch.key_cache) for batch in built)
    cache = torch.zeros((2, blocks, *built[0].key_cache.shape[1:]), dtype=torch.bfloat16, device="cuda")
    columns = max(batch.block_table.shape[1] for batch in built)
    starts, lengths, sinks = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (41, 40, 40))
    table = torch.ones((40, columns), dtype=torch.int32, device="cuda")
    query = torch.zeros((256, 28, 128), dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(query)
    scratch = Scratch.allocate(40, 28, 4, 128, PRIMARY.window, "cuda")
    layer = Layer(cache[0], cache[1], 28, torch.bfloat16, PRIMARY.window, built[0].scale)
    step = Step(256, 256, starts, lengths, table, sinks, scratch)
    launch_layer(layer, step, query, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch_layer(layer, step, query, out)
    for case, batch in zip(batches, built, strict=True):
        rows, tokens = len(case.rows), len(batch.query)
        cache[0, : len(batch.key_cache)], cache[1, : len(batch.value_cache)] = (
            batch.key_cache,
            batch.value_cache,
        )
        starts.fill_(tokens)
        lengths.zero_()
        sinks.zero_()
        starts[: rows + 1], lengths[:rows], sinks[:rows] = (
            batch.cu_seqlens_q,
            batch.seq_lens,
            batch.num_sink_tokens,
        )
        table[:rows, : batch.block_table.shape[1]] = batch.block_table
        query[:tokens] = batch.query
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out[:tokens], launch(case, batch)), case.rows[-1]
        assert out[tokens:].isnan().all()


def test_addresses_past_two_gigabytes() -> None:
    """Blocks beyond 2**31 elements: offsets that int32 arithmetic would wrap."""
    case = replace(PRIMARY, rows=((3000, 1, 16), (3000, 40, 16)))
    batch = build(case, seed=25, device="cuda")
    cache = torch.cat([batch.key_cache, batch.value_cache], dim=-1)
    shift = 2**31 // cache[0].numel() + 3
    far = torch.empty((shift + len(cache), *cache.shape[1:]), dtype=cache.dtype, device="cuda")
    far[shift:] = cache
    moved = replace(
        batch,
        key_cache=far[..., :128],
        value_cache=far[..., 128:],
        block_table=torch.where(
            (batch.block_table > 0) & (batch.block_table < len(cache)), batch.block_table + shift, -1
        ).int(),
    )
    assert torch.equal(launch(case, moved), launch(case, batch))
