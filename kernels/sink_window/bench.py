"""Time sink-window attention on a GPU: cold L2, medians of CUDA graph replays, beside the bytes it must move.

    python -m kernels.sink_window.bench            the primary shape and a few others, as a table

bench/sink_window_compare.py adds vLLM's kernels and FlashAttention-3 on the same inputs.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from kernels.sink_window import cases
from kernels.sink_window.launcher import Config, Scratch, default_config, sink_window_attention

STALE = 2**31 - 1  # a block id far outside any cache: following it is an illegal access
L2_MULTIPLE = 4  # inputs rotate over so many times the L2


@dataclass(frozen=True)
class Inputs:
    """One case on the device. Tables rotate so that consecutive launches share no cache line of the KV."""

    case: cases.Case
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    num_sink_tokens: torch.Tensor
    tables: list[torch.Tensor]  # resident blocks, every other entry STALE
    full_tables: list[torch.Tensor]  # the same, every other entry some valid block: for kernels that read all
    out: torch.Tensor
    scratch: Scratch

    @property
    def max_query_len(self) -> int:
        return max(query_len for _, query_len, _ in self.case.rows)

    @property
    def max_seq_len(self) -> int:
        return max(seq_len for seq_len, _, _ in self.case.rows)


def bytes_moved(case: cases.Case) -> int:
    """Fewest bytes of one launch: visible keys and values once, queries and outputs once."""
    keys = {row: len(cases.visible_positions(row, case.window)) for row in set(case.rows)}
    slot = 2 * case.num_kv_heads * case.head_size * (case.kv_dtype or case.dtype).itemsize
    num_tokens = sum(query_len for _, query_len, _ in case.rows)
    rows = 2 * num_tokens * case.num_heads * case.head_size * case.dtype.itemsize
    return sum(keys[row] for row in case.rows) * slot + rows


def make_inputs(
    case: cases.Case, pool: torch.Tensor, layout: str = "NHD", splits: int | None = None
) -> Inputs:
    """Inputs whose KV lies at random blocks of `pool`, a flat cache from `make_pool`.

    layout "NHD" is vLLM's default, [block][slot][head][key, value]; "HND" is [block][head][slot][key, value].
    """
    device, bs, heads, size = pool.device, case.block_size, case.num_kv_heads, case.head_size
    pool = pool[: len(pool) // (bs * heads * 2 * size) * (bs * heads * 2 * size)]
    shape = (-1, bs, heads, 2 * size) if layout == "NHD" else (-1, heads, bs, 2 * size)
    cache = pool.view(shape) if layout == "NHD" else pool.view(shape).transpose(1, 2)
    num_blocks, batch = cache.shape[0], len(case.rows)
    max_blocks = max((seq_len + bs - 1) // bs for seq_len, _, _ in case.rows)
    seen = [torch.unique(cases.visible_positions(row, case.window) // bs) for row in case.rows]
    per_launch = sum(map(len, seen))
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    copies = max(2, min(64, L2_MULTIPLE * l2 // (per_launch * cache.stride(0) * cache.element_size()) + 1))
    rows = torch.repeat_interleave(torch.arange(batch), torch.tensor([len(s) for s in seen])).to(device)
    columns = torch.cat(seen).to(device)
    tables, full_tables = [], []
    for _ in range(copies):
        ids = torch.randperm(num_blocks, device=device)[:per_launch].int()
        table = torch.full((batch, max_blocks), STALE, dtype=torch.int32, device=device)
        full = torch.randint(num_blocks, (batch, max_blocks), dtype=torch.int32, device=device)
        table[rows, columns] = ids
        full[rows, columns] = ids
        tables.append(table)
        full_tables.append(full)
    query_lens = torch.tensor([0] + [query_len for _, query_len, _ in case.rows])
    cu_seqlens_q = query_lens.cumsum(0).int().to(device)
    query = torch.randn((int(query_lens.sum()), case.num_heads, size), device=device).to(case.dtype)
    return Inputs(
        case=case,
        query=query,
        key_cache=cache[..., :size],
        value_cache=cache[..., size:],
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=torch.tensor([n for n, _, _ in case.rows], dtype=torch.int32, device=device),
        num_sink_tokens=torch.tensor([s for _, _, s in case.rows], dtype=torch.int32, device=device),
        tables=tables,
        full_tables=full_tables,
        out=torch.empty_like(query),
        scratch=Scratch.allocate(batch, case.num_heads, heads, size, case.window, device, splits),
    )


def make_pool(num_bytes: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> torch.Tensor:
    """A flat cache of random values that every case of one dtype can view."""
    pool = torch.empty(num_bytes // dtype.itemsize, dtype=dtype, device=device)
    for part in pool.split(2**28):
        part.copy_(torch.randn(part.numel(), device=device))
    return pool


def ours(inputs: Inputs, config: Config | None = None) -> list[Callable[[], None]]:
    """One launch of our kernel for each of the rotating tables."""
    case, one = inputs.case, torch.ones(1, device=inputs.query.device)

    def launch(table: torch.Tensor) -> Callable[[], None]:
        return lambda: sink_window_attention(
            inputs.query,
            inputs.key_cache,
            inputs.value_cache,
            inputs.cu_seqlens_q,
            inputs.max_query_len,
            inputs.seq_lens,
            table,
            inputs.num_sink_tokens,
            case.window,
            case.head_size**-0.5,
            inputs.out,
            inputs.scratch,
            k_scale=one,
            v_scale=one,
            config=config,
        )

    return [launch(table) for table in inputs.tables]


def time_us(launches: list[Callable[[], None]], replays: int = 15) -> float:
    """Median time of one launch in microseconds: graph replays of all launches in turn.

    Replays for 30 ms first (twice at least), so that the clocks are those of a busy card.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launches[0]()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    started = time.perf_counter()
    for count in itertools.count(1):
        graph.replay()
        torch.cuda.synchronize()
        if count >= 2 and time.perf_counter() - started > 0.03:
            break
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    for event in events:
        event.record()
        graph.replay()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return statistics.median(times) * 1e3 / len(launches)


def copy_bytes_per_s(num_bytes: int = 2**32) -> float:
    """Measured ceiling: a device-to-device copy, bytes read plus bytes written, per second.

    Not in a graph: there a copy becomes a memcpy node, which runs on the slower copy engine.
    """
    source = torch.randn(num_bytes // 4, device="cuda")
    target = torch.empty_like(source)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(12)]
    for event in events:
        event.record()
        target.copy_(source)
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(events[1:])]
    return 2 * num_bytes / (statistics.median(times) * 1e-3)


def main() -> None:
    copy = copy_bytes_per_s()
    print(f"{torch.cuda.get_device_name()}, copy {copy / 1e12:.2f} TB/s")
    pool = make_pool(8 * 2**30)
    shapes = [cases.PRIMARY, *(cases.decodes(b, t) for b in (1, 16, 64) for t in (1024, 65536))]
    shapes += [
        replace(cases.PRIMARY, name="primary, S=0", rows=((4096, 1, 0),) * 256),
        cases.chunks(240, 16, 4096),
    ]
    for case in shapes:
        inputs = make_inputs(case, pool)
        us = time_us(ours(inputs, default_config(case.head_size, case.window)))
        share = bytes_moved(case) / (us * 1e-6) / copy
        print(f"{case.name:45} {us:9.1f} us {100 * share:5.1f} % of the copy's bandwidth")


if __name__ == "__main__":
    main()
