"""`metronome load` for people (tables) and for programs (one JSON object)."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table

from app.load_figures import Figures, Histogram, doubts
from app.load_plan import LoadOptions

Capacity = dict[str, Any]
"""What `/capacity` said; empty where it could not be asked."""


def live(options: LoadOptions, figures: Figures, capacity: Capacity, elapsed_s: float) -> RenderableType:
    """While it runs: a few lines that fit on any terminal."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("time", f"{min(elapsed_s, options.duration_s):.0f} of {options.duration_s:g} s")
    for name, text in _rows(figures, capacity)[:8]:
        table.add_row(name, text)
    table.add_row("client", _headroom(figures))
    bar = ProgressBar(total=options.duration_s, completed=min(elapsed_s, options.duration_s), width=60)
    return Group(bar, table)


def final(figures: Figures, capacity: Capacity) -> RenderableType:
    table = Table(title="metronome load", title_justify="left", show_header=False)
    for name, text in _rows(figures, capacity):
        table.add_row(name, text)
    table.add_row("client's headroom", _headroom(figures))
    reasons = doubts(figures)
    verdict = "[green]the client kept up: these figures are the server's[/green]"
    if reasons:
        why = "; ".join(reasons)
        verdict = (
            f"[red]not to be trusted: {why}. Use more --processes, fewer --clients or another machine.[/red]"
        )
    table.add_row("trust", verdict)
    return table


def as_dict(
    options: LoadOptions, figures: Figures, before: Capacity, after: Capacity, elapsed_s: float
) -> dict[str, Any]:
    """Everything, for `--json`. The key is left out."""
    asked = {name: value for name, value in asdict(options).items() if name != "key"}
    asked["files"] = [str(path) for path in options.files]
    reasons = doubts(figures)
    return {
        "options": asked,
        "elapsed_s": round(elapsed_s, 1),
        "is_trusted": not reasons,
        "doubts": reasons,
        "figures": figures.as_dict(),
        "server": {
            "before": before or None,
            "after": after or None,
            "misses": _grown(before, after, "misses"),
            "admitted": _grown(before, after, "admitted"),
        },
    }


def _rows(figures: Figures, capacity: Capacity) -> list[tuple[str, str]]:
    server = "no answer from /capacity"
    if capacity:
        late = capacity["lateness"]
        server = (
            f"{capacity['active']} active, cap {capacity['cap']}, free {capacity['free']}; last half minute "
            f"p50 {_ms(late['p50_ms'])}, p99 {_ms(late['p99_ms'])}; {capacity['misses']} misses in all"
        )
    return [
        ("sessions", f"{figures.active} active, {figures.accepted} accepted of {figures.attempts} calls"),
        ("refused", _counts(figures.refused)),
        ("could not connect", _counts(figures.failed)),
        ("lateness, client", _histogram(figures.client_lateness)),
        ("lateness, server's ticks", _histogram(figures.server_lateness)),
        ("ticks over budget", str(figures.ticks_over_budget)),
        ("server", server),
        ("first text", _histogram(figures.first_text)),
        ("first sound", _histogram(figures.first_sound)),
        ("turns", f"{figures.turns}, {figures.unanswered} unanswered; answers: {_counts(figures.answers)}"),
        ("warnings", _counts(figures.warnings)),
        ("errors", _counts(figures.errors)),
        ("closed by the server", _counts(figures.closed_by_server)),
        ("ended by the client", _counts(figures.ended_by_client)),
        ("connect to created", _histogram(figures.connect)),
        ("bytes", f"{_bytes(figures.bytes_out)} out, {_bytes(figures.bytes_in)} in"),
        ("sends the socket held up", _histogram(figures.blocked)),
    ]


def _headroom(figures: Figures) -> str:
    cores = ", ".join(f"{cores:.2f}" for cores in figures.cpu_cores) or "?"
    slip, delay = figures.slip.quantile_ms(0.99), figures.loop_delay.quantile_ms(0.99)
    return f"chunks late p99 {_ms(slip)}, event loop late p99 {_ms(delay)}, cores used {cores}"


def _histogram(histogram: Histogram) -> str:
    if not histogram.count:
        return "-"
    p50, p90, p99 = (_ms(histogram.quantile_ms(p)) for p in (0.5, 0.9, 0.99))
    return f"p50 {p50}, p90 {p90}, p99 {p99}, max {_ms(histogram.max_ms)} ({histogram.count})"


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counter.items())) or "-"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def _bytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def _grown(before: Capacity, after: Capacity, name: str) -> int | None:
    return after[name] - before[name] if before and after else None
