"""Table and plot of what endless_day.py measured: endless_day.md and .svg beside its folder of JSON files.

    python -m bench.endless_day_report [DIR]

DIR defaults to bench/results. The plot needs matplotlib (pip install -e '.[bench]'); without it there is only
the table. What stands in the page under "What it says" was written by people and stays.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

READING = "\n## What it says\n"
FIGURES = {
    "tick_ms": "a tick, ms",
    "host_cpu_ms_per_chunk": "CPU time of the process a chunk, ms",
    "rss_mib": "resident memory, MiB",
    "gpu_mib": "GPU memory, MiB",
    "table_blocks": "block table, entries",
    "record_tokens": "token list, tokens",
}


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "bench/results")
    files = sorted((directory / "endless_day").glob("*.json"))
    reports = {path.stem: json.loads(path.read_text()) for path in files}
    if not reports:
        raise SystemExit(f"nothing in {directory / 'endless_day'}")
    page = directory / "endless_day.md"
    _, marker, reading = (page.read_text() if page.is_file() else "").partition(READING)
    page.write_text(table(reports) + marker + reading)
    print(table(reports))
    try:
        import matplotlib  # pyright: ignore[reportMissingImports]
    except ImportError:
        print("no plot: matplotlib is not installed", file=sys.stderr)
        return
    matplotlib.use("Agg")
    plot(reports, directory / "endless_day.svg")


def table(reports: dict[str, dict[str, Any]]) -> str:
    lines = ["# A day in minutes", ""]
    for name, report in reports.items():
        plan = report["plan"]
        chunk = "a second of audio" if plan["with_audio"] else f"{plan['num_tokens']} tokens"
        lines += [
            f"## {name}",
            "",
            f"{report['what'][0].upper()}{report['what'][1:]}, {report['machine']}: "
            f"{plan['num_sessions']} sessions, "
            f"{report['ticks']:,} ticks of {chunk} and {plan['num_decoded']} decoded, which stand "
            f"for {report['hours']:g} h at B = {plan['budget_s']:g} s: {report['tokens_of_a_session']:,} "
            f"tokens a session, max_model_len {report['max_model_len']:,} (trained for "
            f"{report['trained_len']:,}); it took {report['took_s']:g} s."
            + (f" **It broke: {report['broke']}**" if report["broke"] else ""),
            "",
            "| figure | mean | slope an hour (95 % interval) | over the run, of the mean |",
            "|---|---|---|---|",
        ]
        for figure, title in FIGURES.items():
            found = report["slopes"].get(figure)
            if found is None:
                continue
            over = 100 * found["per_hour"] * report["hours"] / found["mean"]
            interval = f"{found['low']:.3g} to {found['high']:.3g}"
            lines.append(
                f"| {title} | {found['mean']:,.4g} | {found['per_hour']:.3g} ({interval}) | {over:+.1f} % |"
            )
        if (ratios := report.get("old_by_young")) is not None:
            (tick, *tick_range), (cpu, *cpu_range) = ratios["tick"], ratios["host_cpu"]
            lines += [
                "",
                "Beside sessions that have only just filled their windows, in turns of ten ticks: the old "
                f"ones' tick takes {tick:.3f} of theirs (95 %: {tick_range[0]:.3f} to "
                f"{tick_range[1]:.3f}), its CPU time {cpu:.3f} ({cpu_range[0]:.3f} to {cpu_range[1]:.3f}).",
            ]
        lines.append("")
    return "\n".join(lines)


def plot(reports: dict[str, dict[str, Any]], path: Path) -> None:
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    models = sorted({report["plan"]["model"] for report in reports.values()})
    shown = ("tick_ms", "host_cpu_ms_per_chunk", "rss_mib", "table_blocks")
    figure, axes = pyplot.subplots(len(models), len(shown), figsize=(4 * len(shown), 3 * len(models)))
    for row, model in enumerate(models):
        for column, name in enumerate(shown):
            axis = axes[row][column] if len(models) > 1 else axes[column]
            for report in reports.values():
                if report["plan"]["model"] != model:
                    continue
                stretches = report["stretches"]
                axis.plot([s["hours"] for s in stretches], [s[name] for s in stretches], label=report["what"])
                if report["broke"] and stretches:
                    axis.plot(stretches[-1]["hours"], stretches[-1][name], "x", color="black")
            axis.set(title=f"{model}: {FIGURES[name]}", xlabel="hours of ticks", ylim=(0, None))
    axes.flat[0].legend() if len(models) > 1 else axes[0].legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
