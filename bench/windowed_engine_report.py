"""Table and plot of what windowed_engine_all.py measured: windowed_engine.md and .svg beside its JSON file.

    python -m bench.windowed_engine_report [DIR]

DIR defaults to bench/results. The plot needs matplotlib (pip install -e '.[bench]'); without it there is only
the table. What was written by hand under "What it says" stays.
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
    found = json.loads((directory / "windowed_engine_all.json").read_text())
    parts = {name: part["result"] for name, part in found.items() if part["result"] is not None}
    outcomes = {name: part["outcome"] for name, part in found.items()}
    page = directory / "windowed_engine.md"
    _, marker, reading = (page.read_text() if page.is_file() else "").partition(READING)
    text = table(parts, outcomes)
    page.write_text(text + marker + reading)
    print(text)
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


def table(parts: dict[str, Any], outcomes: dict[str, str]) -> str:
    first = next(part for part in parts.values() if "chunk" in part)
    lines = [
        "# The whole engine on a GPU: windowed against unbounded",
        "",
        f"{first['machine']}; `python -m bench.windowed_engine_all`, in one call. Qwen2.5-7B's shape with "
        f"random weights, bf16, CUDA graphs up to 2,048 tokens; W = {first['window']}, S = {first['sinks']}. "
        "Milliseconds from one step's results to the next's, median (10th to 90th percentile). Mixed: a "
        f"quarter of the sessions takes in chunks of {first['chunk']} tokens in turn.",
        "",
        *steps(parts),
        *pools(parts),
        *variants(parts),
        *kernels(parts),
        *logits(parts),
        *lives(parts),
        "",
        "| part | outcome |",
        "|---|---|",
        *(f"| {name} | {outcome} |" for name, outcome in outcomes.items()),
    ]
    return "\n".join(lines) + "\n"


def steps(parts: dict[str, Any]) -> list[str]:
    lines = [
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
    return lines


def pools(parts: dict[str, Any]) -> list[str]:
    return [
        f"\n{name.capitalize()}: a pool of {row['num_kv_blocks']:,} blocks of {row['block_size']} tokens, "
        f"{row['blocks_per_session']} per session, room for {row['sessions']:,} sessions; loaded in "
        f"{row['load_s']:.0f} s."
        for name in ("windowed", "unbounded", "fp8")
        for row in points_of_kind(parts.get(name), "limits")
    ]


def variants(parts: dict[str, Any]) -> list[str]:
    names = {"fp8": "fp8 cache", "piecewise": "attention outside of the mixed steps' graphs"}
    rows = [
        f"| {names[name]} | {row['batch']} | {row['age']:,} | {row['kind']} | {cell(row, False)} |"
        for name in names
        for row in (parts.get(name) or {"rows": []})["rows"]
        if row["kind"] in ("decode", "mixed")
    ]
    head = [
        "",
        "| windowed, with | batch | age, tokens | step | ms | tokens a step |",
        "|---|---|---|---|---|---|",
    ]
    return [*head, *rows] if rows else []


def kernels(parts: dict[str, Any]) -> list[str]:
    rows = [
        f"| {name} | {row['batch']} | {row['age']:,} | {row['kind'].split(',')[0]} | {row['step_ms']:.2f} | "
        f"{row['busy_ms']:.2f} | {', '.join(f'{group} {ms:.2f}' for group, ms in row['groups_ms'].items())} |"
        for name, part in parts.items()
        for row in part["rows"]
        if row.get("kind", "").endswith("kernels")
    ]
    head = [
        "",
        "Kernels of a step, by torch's profiler (which makes steps a little longer), ms:",
        "",
        "| engine | batch | age, tokens | step | wall | kernels | of these |",
        "|---|---|---|---|---|---|---|",
    ]
    return [*head, *rows] if rows else []


def logits(parts: dict[str, Any]) -> list[str]:
    rows = [
        f"| {name.removeprefix('logits_')} | {row['kv']}{', fp8 cache' if 'kv_cache_dtype' in row else ''} | "
        f"{'yes' if row['graphs'] else 'no'} | {row.get('tokens', '-')} | "
        f"{row.get('error', row.get('failed'))} | {row.get('error_past_window', '-')} | "
        f"{row.get('error_of_bf16_alone', '-')} | {row.get('error_causal_mask', '-')} |"
        for name, part in parts.items()
        if name.startswith("logits_")
        for row in part["rows"]
    ]
    head = [
        "",
        "Logits against Hugging Face's in float32 under an explicit mask, relative errors:",
        "",
        "| study | engine | graphs | tokens | error | past the window | Hugging Face in bf16 | causal mask |",
        "|---|---|---|---|---|---|---|---|",
    ]
    return [*head, *rows] if rows else []


def lives(parts: dict[str, Any]) -> list[str]:
    return [
        f"\nEngine {row['life'] + 1} in one process: {row['tensors_gib_running']} GiB in tensors while it "
        f"ran ({row['reserved_gib_running']} reserved), once it was closed {row['tensors_gib_closed']} "
        f"({row['reserved_gib_closed']})."
        for row in (parts.get("rebuild") or {"rows": []})["rows"]
        if "tensors_gib_closed" in row
    ]


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
