"""The table and the plots of bench.compaction_quality."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from bench.window_quality import COLOURS, SINKS

BEGIN, END = "<!-- tables: python -m bench.compaction_quality --report-only -->", "<!-- end of tables -->"

RESOLUTION = 1e-8  # nats: a mean KL below it is float32's own rounding


def write_report(result: dict[str, Any], path: Path) -> None:
    """The plot, and the tables between the markers of the .md beside the JSON; the rest is by hand."""
    text = ""
    if "drift" in result:
        text += drift_table(result["drift"])
    if "perplexity" in result:
        text += perplexity_table(result["perplexity"], path)
        text += books_table(result["perplexity"], result["books"], path.with_name("window_quality.json"))
    if "sinks" in result:
        text += sinks_table(result["sinks"])
    page = path.with_suffix(".md")
    before, _, rest = page.read_text().partition(BEGIN) if page.exists() else ("", "", END)
    page.write_text(f"{before}{BEGIN}\n{text}{END}{rest.partition(END)[2]}")
    if "drift" in result and "perplexity" in result:
        plot(result, path.with_suffix(".png"))


def slope(values: list[float]) -> tuple[float, float]:
    """Of a line through values against their index, and half of its 95 % confidence interval."""
    y, x = np.asarray(values), np.arange(len(values))
    design = np.stack([x, np.ones(len(y))], axis=1)
    (line, level), *_ = np.linalg.lstsq(design, y, rcond=None)
    error = y - line * x - level
    spread = math.sqrt(float((error**2).sum()) / (len(y) - 2) / float(((x - x.mean()) ** 2).sum()))
    return float(line), 1.96 * spread


def drift_table(drift: dict[str, Any]) -> str:
    """Each pair over the compactions: the first ten, the last ten, and the slope between."""
    first = drift["first_compacted_bucket"]
    lines = [
        f"## Drift over {drift['num_compactions']} compactions\n",
        f"W = {drift['window_tokens']}, slack {drift['slack_tokens']}, {drift['num_tokens']:,} tokens; "
        f"largest position {drift['largest_position']['kept']:,} kept, "
        f"{drift['largest_position']['compacted']:,} compacted. KL in nats per token.\n",
        "| pair of runs | before any | compactions 1-10 | last 10 | slope per 100 compactions | largest of a "
        "token | loss | same first choice |",
        "|---" * 8 + "|",
    ]
    for name, pair in drift["pairs"].items():
        kl = pair["kl"]
        line, half = slope(kl[first:])
        cells = [f"{fmean(part):.2g}" for part in (kl[:first], kl[first : first + 10], kl[-10:])]
        cells += [f"{100 * line:.1g} ± {100 * half:.1g}", f"{max(pair['largest_kl'][first:]):.2g}"]
        cells += [
            f"{fmean(pair['loss_change'][first:]):+.4f}",
            f"{100 * fmean(pair['same_choice'][first:]):.1f} %",
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n\n"


def perplexity_table(perplexity: dict[str, Any], path: Path) -> str:
    """By S and stretch of the text; and beside transformers without compaction, from bench.window_quality."""
    bucket, runs = perplexity["bucket_tokens"], perplexity["runs"]
    spans = ((0, 1024), (1024, 8192), (8192, 20_000), (20_000, 35_000), (35_000, 50_000))
    lines = [
        "## Perplexity with compaction\n",
        f"W = {perplexity['window_tokens']}, slack {perplexity['slack_tokens']}.\n",
        "| S | " + " | ".join(f"{a:,}-{b:,}" for a, b in spans) + " | compactions | largest position |",
        "|---" * (len(spans) + 3) + "|",
    ]
    for sinks in sorted(int(name[2:]) for name in runs):
        run = runs[f"S={sinks}"]
        nll = run["mean_nll_by_bucket"]
        cells = []
        for start, stop in spans:
            inside = nll[start // bucket : stop // bucket] if stop <= run["num_tokens"] else []
            cells.append(f"{math.exp(fmean(inside)):.2f}" if inside else "")
        cells += [str(run["num_compactions"]), f"{run['largest_position']:,}"]
        lines.append(f"| {sinks} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n\n" + against_window_quality(runs, path.with_name("window_quality.json"))


def books_table(perplexity: dict[str, Any], books: dict[str, int], path: Path) -> str:
    """Each book where it stands in the long session, and alone (bench.window_quality)."""
    bucket, nll = perplexity["bucket_tokens"], perplexity["runs"]["S=16"]["mean_nll_by_bucket"]
    alone = json.loads(path.read_text())["documents"]
    lines = [
        "\nEach book's tokens 1,024 to 6,144 (to the next 256), S = 16: in the one session, and alone "
        "in transformers, from position 0, kept positions:\n",
        "| book | begins at | in the session | alone |",
        "|---|---|---|---|",
    ]
    for name, begin in books.items():
        start = -(-begin // bucket) + 4
        part = nll[start : start + 20]
        own = alone[name.split()[0]]["mean_nll_by_bucket"]["W=1024 S=16"][4:24]
        cells = [f"{math.exp(fmean(part)):.2f}", f"{math.exp(fmean(own)):.2f}"]
        lines.append(f"| {name.replace('_', ' ')} | {begin:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def sinks_table(sinks: dict[str, Any]) -> str:
    bucket, spans = sinks["bucket_tokens"], ((0, 1024), (1024, 4096), (4096, 8192), (8192, 20_000))
    lines = [
        f"\n## Sinks under the exact mask, over {sinks['num_tokens']:,} tokens\n",
        "| S | " + " | ".join(f"{a:,}-{b:,}" for a, b in spans) + " |",
        "|---" * (len(spans) + 1) + "|",
    ]
    for number in sorted(int(name[2:]) for name in sinks["runs"]):
        nll = sinks["runs"][f"S={number}"]
        cells = [f"{math.exp(fmean(nll[a // bucket : b // bucket])):.2f}" for a, b in spans]
        lines.append(f"| {number} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def against_window_quality(runs: dict[str, Any], path: Path) -> str:
    """The first book, 4,096 to 8,192: this engine, compacted, and transformers with every position kept."""
    book = json.loads(path.read_text())["documents"]["alice"]["mean_nll_by_bucket"]
    lines = [
        "The first book, 4,096 to 8,192, beside bench.window_quality's (exact mask, kept positions):\n",
        "| S | transformers, kept positions | engine, compacted |",
        "|---|---|---|",
    ]
    for sinks in SINKS:
        kept, ours = book[f"W=1024 S={sinks}"][16:32], runs[f"S={sinks}"]["mean_nll_by_bucket"][16:32]
        lines.append(f"| {sinks} | {math.exp(fmean(kept)):.2f} | {math.exp(fmean(ours)):.2f} |")
    return "\n".join(lines) + "\n"


def plot(result: dict[str, Any], out: Path) -> None:
    import matplotlib  # pyright: ignore[reportMissingImports]  # pip install -e '.[bench]'

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(11, 9), layout="constrained")
    _plot_drift(above, result["drift"])
    _plot_perplexity(below, result["perplexity"], result["books"])
    figure.suptitle("SmolLM2-135M-Instruct in the engine on the CPU, teacher-forced")
    figure.savefig(out, dpi=120)


def _plot_drift(axis: Any, drift: dict[str, Any]) -> None:
    first = drift["first_compacted_bucket"]
    for index, (name, pair) in enumerate(drift["pairs"].items()):
        kl = np.asarray(pair["kl"])
        smooth = np.convolve(kl, np.ones(5) / 5, mode="valid")
        style = "--" if "against float32" in name else "-"
        x = np.arange(len(smooth)) + 2 - first
        axis.plot(x, np.maximum(smooth, RESOLUTION), style, lw=1.6, color=f"C{index}", label=name)
    axis.axvline(0, color="grey", lw=1, ls=":")
    axis.set(yscale="log", xlabel="compactions so far", ylabel="KL, nats per token (mean of 320 tokens)")
    axis.set_title(f"Drift: W = {drift['window_tokens']}, {drift['slack_tokens']} tokens cut out each time")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _plot_perplexity(axis: Any, perplexity: dict[str, Any], books: dict[str, int]) -> None:
    bucket, wide = perplexity["bucket_tokens"], 4  # buckets of one step in the plot
    for sinks, colour in zip(SINKS, COLOURS, strict=True):
        nll = perplexity["runs"][f"S={sinks}"]["mean_nll_by_bucket"]
        means = [math.exp(fmean(nll[i : i + wide])) for i in range(0, len(nll) - wide + 1, wide)]
        edges = [i * bucket * wide for i in range(len(means) + 1)]
        axis.stairs(means, edges, baseline=None, color=colour, lw=1.8, label=f"S = {sinks}")
    for name, begin in books.items():
        axis.axvline(begin, color="grey", lw=1, ls=":")
        _label(axis, begin, 0.98, name.replace("_", " "))
    axis.axvline(8192, color="black", lw=1, ls="--")
    _label(axis, 8192, 0.9, "trained length")
    axis.set(
        yscale="log", xlabel="tokens so far", ylabel="perplexity, means over 1,024 tokens", xlim=(0, 50_000)
    )
    axis.set_title(
        f"Perplexity: W = {perplexity['window_tokens']:,}, slack {perplexity['slack_tokens']}; on the CPU S "
        "is rounded to a block, so S = 1, 4 and 16 are one line"
    )
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _label(axis: Any, x: int, height: float, text: str) -> None:
    axis.text(x + 150, height, text, fontsize=8, va="top", transform=axis.get_xaxis_transform())
