"""Time the key rotation on a GPU, beside a copy of the same bytes.

    python -m kernels.rebase.bench [--tune] [--out FILE.json]      a table; --tune tries other launch sizes

"floor" is the time the card takes to read the moved keys once and write them once, at the bandwidth of a
measured device-to-device copy. "plan" and "launch" are the time the engine's thread is busy: checking, tables
and the copy to the device; Triton's launch. "torch" is the same in torch operations, layer by layer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernels.rebase.cases import PRIMARY, Batch, Case, build
from kernels.rebase.launcher import Config, KeyCaches, Moves, plan_moves, rebase_keys
from kernels.rebase.reference import FP8, rotate_back, rounded
from kernels.sink_window.bench import copy_bytes_per_s, time_us

CASES = (
    PRIMARY,
    *(replace(PRIMARY, name=f"the same, {n} sessions", moves=PRIMARY.moves[:n]) for n in (1, 8)),
    replace(PRIMARY, name="the same, GPT-J", is_neox=False),
    replace(PRIMARY, name="the same, a quarter turned", rotary_dim=32),
    replace(PRIMARY, name="the same, heads outside of slots", layout="HND"),
    replace(PRIMARY, name="the same, fp8", dtype=FP8),
    replace(PRIMARY, name="48 layers x 4 heads of 128 (Qwen3-Omni-30B)", num_layers=48),
    replace(PRIMARY, name="30 layers x 3 heads of 64 (SmolLM2)", num_layers=30, num_kv_heads=3, head_size=64),
)
TUNED = CASES[:2] + CASES[3:5] + CASES[6:7] + CASES[8:]
TRIED = [
    (rows, warps) for rows, warps in product((8, 16, 32, 64, 128), (1, 2, 4, 8)) if 4 <= rows / warps <= 32
]
COLD_BYTES = 2**29  # few moved blocks are spread over copies of the caches of so many bytes, to be read cold


def bytes_moved(case: Case) -> int:
    """Turned dimensions of the moved keys, read once and written once."""
    keys = sum(count for count, _ in case.moves) * case.block_size * case.num_kv_heads * case.num_layers
    return 2 * keys * case.rotation.rotary_dim * case.dtype.itemsize


def planned(case: Case, batch: Batch) -> Moves:
    num_blocks = len(batch.key_caches[0])
    return plan_moves(batch.block_ids, batch.distances, case.rotation, num_blocks, batch.buffer.device)


def kernel_us(case: Case, batches: list[Batch], config: Config | None = None) -> float:
    moves = [planned(case, batch) for batch in batches]
    caches = [KeyCaches.of(batch.key_caches) for batch in batches]
    return time_us([_launcher(case, *pair, config) for pair in zip(caches, moves, strict=True)])


def _launcher(case: Case, caches: KeyCaches, moves: Moves, config: Config | None) -> Callable[[], None]:
    return lambda: rebase_keys(caches, moves, case.rotation, config)


def torch_us(case: Case, batch: Batch) -> float:
    """Gather, turn in float32, scatter: one layer after the other."""
    moves = planned(case, batch)
    ids, turns = moves.block_ids.long(), moves.turns[moves.turn_ids.long()][:, None, None]

    def step() -> None:
        for cache in batch.key_caches:
            cache[ids] = rounded(rotate_back(cache[ids], turns, case.rotation), cache.dtype)

    return time_us([step], replays=5)


def host_us(case: Case, batch: Batch, repeats: int = 100) -> tuple[float, float]:
    """Median times the calling thread spends on planning and launching one compaction, the device idle.

    From arrays and with a rotation that is kept, as the engine's mover calls it.
    """
    caches, rotation = KeyCaches.of(batch.key_caches), case.rotation
    ids, distances = np.array(batch.block_ids), np.array(batch.distances)
    num_blocks, times = len(batch.key_caches[0]), []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        moves = plan_moves(ids, distances, rotation, num_blocks, batch.buffer.device)
        middle = time.perf_counter()
        rebase_keys(caches, moves, rotation)
        times.append((middle - begin, time.perf_counter() - middle))
    plan, launch = (1e6 * statistics.median(column) for column in zip(*times, strict=True))
    return plan, launch


def tuning_us(case: Case, batches: list[Batch]) -> dict[str, float]:
    return {
        f"{rows} rows, {warps} warps": kernel_us(case, batches, Config(rows, warps)) for rows, warps in TRIED
    }


def ranking(rows: list[dict[str, Any]]) -> list[tuple[str, float]]:
    """Configurations, the best first: the geometric mean over the tuned cases of time over the best time."""
    tuned = [row["tuning"] for row in rows if "tuning" in row]
    slower = {
        name: statistics.geometric_mean(times[name] / min(times.values()) for times in tuned)
        for name in (tuned[0] if tuned else ())
    }
    return sorted(slower.items(), key=lambda item: item[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    copy = copy_bytes_per_s()
    print(f"{torch.cuda.get_device_name()}, copy {copy / 1e12:.2f} TB/s\n")
    print("| case | kernel us | floor us | of the copy's bandwidth | torch us | plan us | launch us |")
    print("|---|" + "---|" * 6)
    rows: list[dict[str, Any]] = []
    for case in CASES:
        copies = max(1, min(8, COLD_BYTES // bytes_moved(case)))
        batches = [build(case, seed, "cuda") for seed in range(copies)]
        us, floor = kernel_us(case, batches), bytes_moved(case) / copy * 1e6
        plan, launch = host_us(case, batches[0])
        row: dict[str, Any] = {"case": case.name, "kernel_us": us, "floor_us": floor}
        row |= {"plan_us": plan, "launch_us": launch}
        row["torch_us"] = torch_us(case, batches[0]) if case.dtype != FP8 else None  # cannot index fp8
        torch_text = "" if row["torch_us"] is None else f"{row['torch_us']:.0f}"
        share = f"{100 * floor / us:.0f} %"
        print(
            f"| {case.name} | {us:.1f} | {floor:.1f} | {share} | {torch_text} | {plan:.0f} | {launch:.0f} |"
        )
        if options.tune and case in TUNED:
            row["tuning"] = tuning_us(case, batches)
        rows.append(row)
        del batches
        torch.cuda.empty_cache()
    for row in rows:
        if "tuning" in row:
            print(row["case"], sorted(row["tuning"].items(), key=lambda item: item[1])[:4])
    if options.tune:
        print("best over all, times slower than each case's best:", ranking(rows)[:5])
    if options.out is not None:
        from bench.provenance import provenance  # here: nothing else in kernels knows of it

        result = provenance("cuda") | {"copy_bytes_per_s": copy, "ranking": ranking(rows), "cases": rows}
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
