"""Table and plot of what endless_day.py and endless_day_server.py measured: a page and an SVG.

    python -m bench.endless_day_report [DIR]

Writes endless_day.md and .svg into DIR (bench/results), of its folder endless_day; dry runs are left out. The
plot needs matplotlib (pip install -e '.[bench]'); without it there is only the page. What stands in the page
under "Beside it" was written by people and stays; all else is made here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench.endless_day_meter import slopes

BESIDE = "\n## Beside it\n"
FIGURES = {
    "tick_ms": "a tick, ms",
    "host_cpu_ms_per_chunk": "CPU time of the process a chunk, ms",
    "rss_mib": "resident memory, MiB",
    "malloc_in_use_kib": "in use by malloc, KiB",
    "python_blocks": "Python's memory blocks",
    "gpu_mib": "GPU memory, MiB",
    "table_blocks": "block table, entries",
    "record_tokens": "token list, tokens",
}


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else "bench/results")
    files = sorted((directory / "endless_day").glob("*.json"))
    reports = {path.stem: json.loads(path.read_text()) for path in files if not path.stem.endswith("_small")}
    for report in reports.values():
        report["slopes"], report["late_slopes"] = slopes(report), slopes(report, second_half=True)
    if not reports:
        raise SystemExit(f"nothing in {directory / 'endless_day'}")
    page = directory / "endless_day.md"
    _, marker, beside = (page.read_text() if page.is_file() else "").partition(BESIDE)
    made = "\n".join(["# A day in minutes", "", *summary(reports), "", *tables(reports)])
    page.write_text(made + marker + beside)
    print(made)
    try:
        import matplotlib  # pyright: ignore[reportMissingImports]
    except ImportError:
        print("no plot: matplotlib is not installed", file=sys.stderr)
        return
    matplotlib.use("Agg")
    plot(reports, directory / "endless_day.svg")


def summary(reports: dict[str, dict[str, Any]]) -> list[str]:
    """What the figures say, a line for each run."""
    lines = [
        "A figure grows where the 95 % interval of its slope lies above zero (of 40 that do not, one will by "
        "chance). Slopes are least squares over a run's stretches without the first ones; intervals allow "
        "for neighbouring stretches that are alike (Newey-West, 4 lags). What grows, over the whole run:",
        "",
    ]
    for name, report in reports.items():
        sessions = f"{report['plan']['num_sessions']} sessions, {report['hours']:g} h of ticks"
        if report["broke"]:
            tokens = report["tokens_of_a_session"]
            lines.append(f"- `{name}`: {sessions}, then it broke, at {tokens:,} tokens a session.")
            continue
        growing = [_growth(report, figure) for figure in FIGURES if _grows(report["slopes"].get(figure))]
        lines.append(f"- `{name}`: {sessions}. {_listed(growing)}{_aged(report)}")
    return lines


def _grows(found: dict[str, float] | None) -> bool:
    return found is not None and found["low"] > 0


def _growth(report: dict[str, Any], figure: str) -> str:
    found = report["slopes"][figure]
    over = found["per_hour"] * report["hours"]
    text = f"{FIGURES[figure]} (+{over:.3g}, {over / found['mean']:+.2%}; {_per_tick(report, found, figure)}"
    late = report["late_slopes"].get(figure)
    if late is not None:
        text += (
            f"; in the second half {'still' if _grows(late) else 'not'}: {_per_tick(report, late, figure)}"
        )
    return f"{text})"


def _per_tick(report: dict[str, Any], found: dict[str, float], figure: str) -> str:
    scale = report["plan"]["budget_s"] / 3600
    scale *= {"rss_mib": 2**20, "gpu_mib": 2**20, "malloc_in_use_kib": 1024}.get(figure, 1)
    what = "bytes a tick" if figure in ("rss_mib", "gpu_mib", "malloc_in_use_kib") else "a tick"
    rise, low, high = (scale * found[name] for name in ("per_hour", "low", "high"))
    return f"{rise:.2g} {what}, {low:.2g} to {high:.2g}"


def _listed(growing: list[str]) -> str:
    return f"Grows: {', '.join(growing)}." if growing else "Nothing grows."


def _aged(report: dict[str, Any]) -> str:
    ratios = report.get("old_by_young")
    if not ratios:
        return ""
    (tick, *tick_range), (cpu, *cpu_range) = ratios["tick"], ratios["host_cpu"]
    return (
        " Beside sessions that have only just filled their windows, in turns of ten ticks, the old ones' "
        f"tick takes {tick:.3f} of theirs (95 %: {tick_range[0]:.3f} to {tick_range[1]:.3f}), its CPU time "
        f"{cpu:.3f} ({cpu_range[0]:.3f} to {cpu_range[1]:.3f})."
    )


def tables(reports: dict[str, dict[str, Any]]) -> list[str]:
    lines = []
    for name, report in reports.items():
        plan = report["plan"]
        lines += [
            f"## {name}",
            "",
            f"{report['what'][0].upper()}{report['what'][1:]}, {report['machine']}: "
            f"{plan['num_sessions']} sessions, "
            f"{report['ticks']:,} ticks of {_intake(plan)} and {plan['num_decoded']} decoded, which stand "
            f"for {report['hours']:g} h at B = {plan['budget_s']:g} s{_tokens(report)}; it took "
            f"{report['took_s']:g} s." + (f" **It broke: {report['broke']}**" if report["broke"] else ""),
            "",
            "| figure | mean | slope an hour (95 % interval) | over the run, of the mean | grows |",
            "|---|---|---|---|---|",
        ]
        for figure, title in FIGURES.items():
            found = report["slopes"].get(figure)
            if found is None:
                continue
            over = 100 * found["per_hour"] * report["hours"] / found["mean"]
            interval = f"{found['low']:.3g} to {found['high']:.3g}"
            lines.append(
                f"| {title} | {found['mean']:,.4g} | {found['per_hour']:.3g} ({interval}) | {over:+.2f} % | "
                f"{'yes' if _grows(found) else 'no'} |"
            )
        lines.append("")
    return lines


def _tokens(report: dict[str, Any]) -> str:
    if "max_model_len" not in report:
        return ""  # not an engine
    return (
        f": {report['tokens_of_a_session']:,} tokens a session, max_model_len {report['max_model_len']:,} "
        f"(trained for {report['trained_len']:,})"
    )


def _intake(plan: dict[str, Any]) -> str:
    if "intake" in plan:
        return plan["intake"]
    audio, tokens = f"{plan['budget_s']:g} s of audio", f"{plan['num_tokens']} tokens"
    if not plan["with_audio"]:
        return tokens
    every = plan["audio_every"]
    return audio if every == 1 else f"{tokens}, each {every}th of a session {audio} instead,"


def plot(reports: dict[str, dict[str, Any]], path: Path) -> None:
    """A row for each model: ours and vLLM's own on the same axes, by the age of the sessions."""
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    models = sorted({report["plan"]["model"] for report in reports.values()})
    shown = ("tick_ms", "host_cpu_ms_per_chunk", "rss_mib", "record_tokens")
    size = (4.5 * len(shown), 3 * len(models))
    figure, grid = pyplot.subplots(len(models), len(shown), figsize=size, squeeze=False)
    for row, model in zip(grid, models, strict=True):
        of_model = [report for report in reports.values() if report["plan"]["model"] == model]
        for axis, name in zip(row, shown, strict=True):
            for report in of_model:
                points = [(s["hours"], s[name]) for s in report["stretches"] if name in s]
                if not points:
                    continue
                color = "C1" if report["what"].startswith("vLLM") else "C0"
                axis.plot(*zip(*points, strict=True), label=report["what"], color=color)
                if report["broke"]:
                    axis.plot(*points[-1], "x", color=color, markersize=9, markeredgewidth=2)
            if not axis.lines:
                axis.set_axis_off()  # the server has no such figure
                continue
            axis.set_title(f"{model}: {FIGURES[name]}", fontsize="medium")
            axis.set(xlabel="hours of ticks", xscale="log", ylim=(0, 1.1 * axis.dataLim.y1))
            axis.xaxis.set_minor_formatter("")
        row[0].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
