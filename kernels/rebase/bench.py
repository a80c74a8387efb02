"""Time the key rotation on a GPU, beside a copy of the same bytes.

    python -m kernels.rebase.bench [--tune] [--out FILE.json]      a table; --tune tries other launch sizes

"floor" is the time the card takes to read the moved keys once and write them once, at the bandwidth of a
measured device-to-device copy. "host" is the time the engine's thread is busy: planning, the copy to the
device, the launch. "torch" is the same in torch operations, layer by layer.
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


def host_us(case: Case, batch: Batch, repeats: int = 50) -> float:
    """Median time the calling thread spends on one compaction, the device idle before."""
    caches, times = KeyCaches.of(batch.key_caches), []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        rebase_keys(caches, planned(case, batch), case.rotation)
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    copy = copy_bytes_per_s()
    print(f"{torch.cuda.get_device_name()}, copy {copy / 1e12:.2f} TB/s\n")
    print(
        "| case | kernel us | floor us | of the copy's bandwidth | torch us | host us |\n|---|" + "---|" * 5
    )
    rows = []
    for case in CASES:
        copies = max(1, min(8, COLD_BYTES // bytes_moved(case)))
        batches = [build(case, seed, "cuda") for seed in range(copies)]
        us, floor = kernel_us(case, batches), bytes_moved(case) / copy * 1e6
        row = {"case": case.name, "kernel_us": us, "floor_us": floor, "host_us": host_us(case, batches[0])}
        row["torch_us"] = torch_us(case, batches[0]) if case.dtype != FP8 else None  # cannot index fp8
        torch_text = "" if row["torch_us"] is None else f"{row['torch_us']:.0f}"
        share = 100 * floor / us
        print(
            f"| {case.name} | {us:.1f} | {floor:.1f} | {share:.0f} % | {torch_text} | {row['host_us']:.0f} |"
        )
        if options.tune:
            tried = product((16, 32, 64, 128), (1, 2, 4, 8))
            row["tuning"] = {f"{r} rows, {w} warps": kernel_us(case, batches, Config(r, w)) for r, w in tried}
            print(f"  {sorted(row['tuning'].items(), key=lambda item: item[1])[:4]}")
        rows.append(row)
        del batches
        torch.cuda.empty_cache()
    if options.out is not None:
        about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "copy_bytes_per_s": copy}
        options.out.write_text(json.dumps(about | {"cases": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
