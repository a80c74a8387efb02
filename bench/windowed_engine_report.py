"""Table and plot of what windowed_engine_gpu.py measured: windowed_engine.md and .svg beside the JSON files.

    python -m bench.windowed_engine_report [DIR]

DIR defaults to bench/results. The plot needs matplotlib (pip install -e '.[bench]'); without it there is only
the table.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

READING = "\n## What it says\n"
GOAL_MS = 9.5  # of the decode step at batch 256, at any age

Rows = list[dict[str, Any]]


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "bench/results")
    parts = {
        part: json.loads(path.read_text())
        for part in ("logits", "windowed", "unbounded", "graphs")
        if (path := directory / f"windowed_engine_{part}.json").is_file()
    }
    if not parts:
        raise SystemExit(f"no windowed_engine_*.json in {directory}")
    page = directory / "windowed_engine.md"
    # What people wrote about the figures stays.
    _, marker, reading = (page.read_text() if page.is_file() else "").partition(READING)
    page.write_text(table(parts) + marker + reading)
    print(table(parts))
    try:
        import matplotlib  # pyright: ignore[reportMissingImports]
    except ImportError:
        print("no plot: matplotlib is not installed", file=sys.stderr)
        return
    matplotlib.use("Agg")
    plot(parts, directory / "windowed_engine.svg")


def points(part: dict[str, Any] | None, kind: str) -> dict[tuple[int, int], dict[str, Any]]:
    """(batch, age) -> row."""
    rows: Rows = part["rows"] if part else []
    return {(row["batch"], row["age"]): row for row in rows if row["kind"] == kind}


def table(parts: dict[str, Any]) -> str:
    first = next(part for name, part in parts.items() if name != "logits")
    sizes = f"W = {first['window']}, S = {first['sinks']}"
    what = (
        "Milliseconds from one step's results to the next's, median (10th to 90th percentile). Mixed: a "
        f"quarter of the sessions takes in chunks of {first['chunk']} tokens in turn"
    )
    lines = [
        "# The whole engine on a GPU: windowed against unbounded",
        "",
        f"{first['machine']}, commit {first['commit']}; `{first['command'].split(' --')[0]}`. "
        f"Qwen2.5-7B's shape with random weights, bf16, CUDA graphs; {sizes}. {what}.",
        "",
        "| batch | age, tokens | decode, windowed | decode, unbounded | mixed, windowed | mixed, unbounded |",
        "|---|---|---|---|---|---|",
    ]
    columns = [
        (points(parts.get(part), kind), points(parts.get(part), "does not fit"))
        for kind in ("decode", "mixed")
        for part in ("windowed", "unbounded")
    ]
    for batch, age in sorted({key for found, lost in columns for key in (*found, *lost)}):
        cells = [cell(found.get((batch, age)), (batch, age) in lost) for found, lost in columns]
        lines.append(f"| {batch} | {age:,} | {' | '.join(cells)} |")
    for part in ("windowed", "unbounded"):
        for row in points_of_kind(parts.get(part), "limits"):
            lines.append("")
            lines.append(
                f"{part.capitalize()}: a pool of {row['num_kv_blocks']:,} blocks of {row['block_size']} "
                f"tokens, {row['blocks_per_session']} per session, room for {row['sessions']:,} sessions."
            )
    if "graphs" in parts:
        lines += [
            "",
            "The above with CUDA graphs up to vLLM's own limit of 512 tokens a step. Windowed with graphs "
            "for up to 2,048 tokens, in another call:",
            "",
            "| batch | age, tokens | step | ms | tokens a step |",
            "|---|---|---|---|---|",
        ]
        for row in parts["graphs"]["rows"]:
            if "step_ms" in row:
                where = f"{row['batch']} | {row['age']:,} | {row['kind']}"
                lines.append(f"| {where} | {cell(row, False)} | {row['tokens_per_step']} |")
    if "logits" in parts:
        lines += [
            "",
            "| logits against a float32 judge | CUDA graphs | relative error | under the causal mask |",
        ]
        lines.append("|---|---|---|---|")
        for row in parts["logits"]["rows"]:
            name = row["kv"] + (", fp8 cache" if "kv_cache_dtype" in row else "")
            found = (row.get("error", row.get("failed")), row.get("error_causal_mask", "-"))
            lines.append(f"| {name} | {'yes' if row['graphs'] else 'no'} | {found[0]} | {found[1]} |")
    return "\n".join(lines) + "\n"


def points_of_kind(part: dict[str, Any] | None, kind: str) -> Rows:
    return [row for row in part["rows"] if row["kind"] == kind] if part else []


def cell(row: dict[str, Any] | None, is_lost: bool) -> str:
    if row is None:
        return "does not fit" if is_lost else "-"
    return f"{row['step_ms']:.2f} ({row['p10_ms']:.2f} to {row['p90_ms']:.2f})"


def plot(parts: dict[str, Any], path: Path) -> None:
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.6))
    for axis, kind in zip(axes, ("decode", "mixed"), strict=True):
        for part, style in (("windowed", "-o"), ("unbounded", "--s")):
            found = points(parts.get(part), kind)
            for batch in sorted({batch for batch, _ in found}, reverse=True):
                ages = [age for other, age in sorted(found) if other == batch]
                times = [found[batch, age]["step_ms"] for age in ages]
                axis.plot(ages, times, style, label=f"{part}, batch {batch}")
        if kind == "decode":
            axis.axhline(GOAL_MS, color="grey", linewidth=0.8, label=f"goal at 256: {GOAL_MS} ms")
        axis.set(title=f"{kind} step", xlabel="age of the sessions, tokens", xscale="log", ylim=(0, None))
        axis.set_xticks([1024, 2048, 4096, 8192], ["1k", "2k", "4k", "8k"])
        axis.set_xticks([], minor=True)
        axis.legend(fontsize=7)
    axes[0].set_ylabel("ms")
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
