"""Sink-window attention beside vLLM's attention kernels and FlashAttention-3, on the same inputs, on a GPU.

    python -m bench.sink_window_compare --out bench/results/sink_window.json [--commit ID]
    python -m bench.sink_window_compare --render bench/results/sink_window.json     its tables as markdown

Times are medians of CUDA graph replays with a cold L2 (kernels/sink_window/bench.py says how).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton

from bench.sink_window_stock import flash3, stock_triton
from kernels.sink_window import cases
from kernels.sink_window.bench import (
    Inputs,
    bytes_moved,
    copy_bytes_per_s,
    make_inputs,
    make_pool,
    ours,
    time_us,
)
from kernels.sink_window.cases import Case, chunks, decodes
from kernels.sink_window.launcher import FP8

SEGMENTS = 16  # vLLM 0.32's NUM_PAR_SOFTMAX_SEGMENTS, and its threshold of 128 programs below
Launches = list[Callable[[], None]]


def stock(inputs: Inputs, window: int | None, prefix: bool = False) -> Launches:
    """vLLM's stock Triton kernel: windowed, full (window None), or with its R-SWA mask (prefix True), whose
    prefix is our sinks. Launched as vLLM does: segmented where the batch is small."""
    case, size = inputs.case, inputs.case.head_size
    threshold = 128 // case.num_kv_heads
    rows = (threshold, case.num_heads, SEGMENTS)
    segment_out = torch.empty((*rows, size), dtype=torch.float32, device=inputs.query.device)
    segment_max, segment_sum = (
        torch.empty(rows, dtype=torch.float32, device=inputs.query.device) for _ in "ms"
    )
    attention = stock_triton().unified_attention

    def launch(table: torch.Tensor) -> Callable[[], None]:
        return lambda: attention(
            q=inputs.query,
            k=inputs.key_cache,
            v=inputs.value_cache,
            out=inputs.out,
            cu_seqlens_q=inputs.cu_seqlens_q,
            max_seqlen_q=inputs.max_query_len,
            seqused_k=inputs.seq_lens,
            max_seqlen_k=inputs.max_seq_len,
            softmax_scale=size**-0.5,
            causal=True,
            window_size=(-1, -1) if prefix or window is None else (window - 1, 0),
            block_table=table,
            softcap=0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            seq_threshold_3D=threshold,
            num_par_softmax_segments=SEGMENTS,
            softmax_segm_output=segment_out,
            softmax_segm_max=segment_max,
            softmax_segm_expsum=segment_sum,
            rswa_prefix_lens=inputs.num_sink_tokens if prefix else None,
            rswa_window=window if prefix else None,
        )

    return [launch(table) for table in inputs.full_tables]


def flash(inputs: Inputs, window: int | None, num_splits: int) -> Launches:
    """FlashAttention-3, windowed or full, scheduled ahead as in vLLM's CUDA graphs (num_splits 32 there)."""
    case = inputs.case
    attention, metadata = flash3()
    bounds = [-1, -1] if window is None else [window - 1, 0]
    schedule = metadata(
        batch_size=len(case.rows),
        max_seqlen_q=inputs.max_query_len,
        max_seqlen_k=inputs.max_seq_len,
        num_heads_q=case.num_heads,
        num_heads_kv=case.num_kv_heads,
        headdim=case.head_size,
        cache_seqlens=inputs.seq_lens,
        qkv_dtype=case.dtype,
        cu_seqlens_q=inputs.cu_seqlens_q,
        page_size=case.block_size,
        causal=True,
        window_size=bounds,
        num_splits=num_splits,
    )

    def launch(table: torch.Tensor) -> Callable[[], None]:
        return lambda: attention(
            q=inputs.query,
            k=inputs.key_cache,
            v=inputs.value_cache,
            out=inputs.out,
            cu_seqlens_q=inputs.cu_seqlens_q,
            max_seqlen_q=inputs.max_query_len,
            seqused_k=inputs.seq_lens,
            max_seqlen_k=inputs.max_seq_len,
            softmax_scale=case.head_size**-0.5,
            causal=True,
            window_size=bounds,
            block_table=table,
            scheduler_metadata=schedule,
            num_splits=num_splits,
            fa_version=3,
        )

    return [launch(table) for table in inputs.full_tables]


W = 1024
WIDE = (32, 8)
# Experiment -> its cases. Every case runs ours; the experiments in BASELINES run the others too.
EXPERIMENTS: dict[str, list[Case]] = {
    "batch": [decodes(b, 4096) for b in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)],
    "batch, S = 0": [decodes(b, 4096, 0) for b in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)],
    "context at batch 256": [decodes(256, t) for t in (1024, 4096, 16384, 65536)],
    "context at batch 16": [decodes(16, t) for t in (1024, 4096, 16384, 65536)],
    "32/8 heads": [decodes(b, 4096, 16, WIDE) for b in (1, 16, 64, 256)] + [decodes(256, 65536, 16, WIDE)],
    "mixed": [chunks(d, c, t) for d, c in ((240, 16), (192, 64), (0, 64)) for t in (4096, 65536)],
    "sinks": [decodes(256, 4096, s) for s in (0, 1, 16, 42, 64, 256)],
    "block size": [
        replace(cases.PRIMARY, name=f"primary, blocks of {bs}", block_size=bs) for bs in (16, 32, 64, 128)
    ],
    "other heads": [
        replace(cases.PRIMARY, name="9/3 heads of 64", num_heads=9, num_kv_heads=3, head_size=64),
        replace(cases.PRIMARY, name="16/2 heads of 256", num_heads=16, num_kv_heads=2, head_size=256),
        replace(cases.PRIMARY, name="28/4 heads of 128, fp8 cache", kv_dtype=FP8),
    ],
}
BOUNDED = ("ours", "stock", "FA3 windowed")  # kernels whose work a window bounds
WHOLE = ("stock R-SWA", "FA3 full")  # kernels that walk the whole context
BASELINES = ("batch", "batch, S = 0", "context at batch 256", "context at batch 16", "32/8 heads", "mixed")


def measure(case: Case, pool: torch.Tensor, names: Sequence[str], layout: str = "NHD") -> dict[str, float]:
    """Microseconds of the named kernels on one case."""
    inputs = make_inputs(case, pool, layout)
    launches: dict[str, Callable[[], list[Launches]]] = {
        "ours": lambda: [ours(inputs)],
        "stock": lambda: [stock(inputs, W)],
        "FA3 windowed": lambda: [flash(inputs, W, splits) for splits in (1, 32)],
        "stock R-SWA": lambda: [stock(inputs, W, prefix=True)],
        "FA3 full": lambda: [flash(inputs, None, splits) for splits in (1, 32)],
    }
    return {name: round(min(time_us(each) for each in launches[name]()), 2) for name in names}


def run() -> dict[str, Any]:
    """Every experiment on this machine's GPU. The kernels that read whole contexts run after all others: some
    draw so much power for so long that the card clocks down, and what follows them would look slow."""
    copy = copy_bytes_per_s()
    pools = {torch.bfloat16: make_pool(4 * 2**30), FP8: make_pool(2**30, FP8)}
    bf16 = pools[torch.bfloat16]
    print(f"copy {copy / 1e12:.3f} TB/s", flush=True)
    results: dict[str, list[dict[str, Any]]] = {}
    for bounded in (True, False):
        for name, batch in EXPERIMENTS.items():
            compared = name in BASELINES
            rows = results.setdefault(
                name, [{"case": case.name, "layout": "NHD", "us": {}} for case in batch]
            )
            kernels = BOUNDED[: None if compared else 1] if bounded else WHOLE if compared else ()
            for row, case in zip(rows, batch, strict=True):
                row["us"] |= measure(case, pools[case.kv_dtype or case.dtype], kernels)
            print(name, *rows, sep="\n", flush=True)
        if bounded:
            again = [(cases.PRIMARY, "NHD")] * 5 + [(decodes(b, 4096), "HND") for b in (16, 256)]
            results["the primary shape again, and a head-major cache"] = [
                {"case": case.name, "layout": layout, "us": measure(case, bf16, BOUNDED[:1], layout)}
                for case, layout in again
            ]
    shapes = {case.name: case for batch in EXPERIMENTS.values() for case in batch} | {
        "primary": cases.PRIMARY
    }
    for row in (row for rows in results.values() for row in rows):
        row["bytes"] = bytes_moved(shapes[row["case"]])
        row["floor_us"] = round(row["bytes"] / copy * 1e6, 2)
        row["share_of_copy"] = round(row["floor_us"] / row["us"]["ours"], 4)
    return {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "vllm": "0.32.0 (its kernels' files)",
        "command": "python -m bench.sink_window_compare " + " ".join(sys.argv[1:]),
        "copy_bytes_per_s": round(copy),
        "experiments": results,
    }


def render(report: dict[str, Any]) -> str:
    """The report's experiments as markdown tables."""
    lines = []
    for name, rows in report["experiments"].items():
        kernels = list(rows[0]["us"])
        lines += [f"### {name}", "", f"| case | {' | '.join(kernels)} | floor | ours / floor |"]
        lines.append("|---|" + "---:|" * (len(kernels) + 2))
        for row in rows:
            times = " | ".join(f"{row['us'][kernel]:.1f}" for kernel in kernels)
            layout = "" if row["layout"] == "NHD" else f", {row['layout']}"
            share = f"{row['floor_us']:.1f} | {100 * row['share_of_copy']:.1f} %"
            lines.append(f"| {row['case']}{layout} | {times} | {share} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="where to write the JSON report")
    parser.add_argument("--commit", default="", help="the commit that is measured, for the report")
    parser.add_argument("--render", type=Path, help="print an earlier report's tables instead")
    options = parser.parse_args()
    if options.render:
        print(render(json.loads(options.render.read_text())))
        return
    report = {"commit": options.commit} | run()
    print(render(report))
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
