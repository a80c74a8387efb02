"""What endless_day.py measures: figures of a stretch of ticks, and their slopes."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np

NUM_STRETCHES, NUM_LEFT_OUT = 48, 6  # of a run; of those, in which what is bounded fills up
NO_CACHES = "glibc.malloc.tcache_count=0"
NUM_LAGS = 4  # neighbouring stretches that a slope's interval takes to be alike
MEMORY = ("rss_mib", "malloc_in_use_kib", "python_blocks", "gpu_mib")
FIGURES = (*MEMORY, "host_cpu_ms_per_chunk", "tick_ms", "table_blocks", "record_tokens")


class Meter:
    """Sums over one stretch of the run. Its own memory is taken at the start, so that it does not grow."""

    def __init__(self, device: Literal["cpu", "cuda"], num_sessions: int, max_rows: int) -> None:
        self._device, self._num_sessions = device, num_sessions
        self._columns = ("hours", *FIGURES)
        self._table = np.full((max_rows, len(self._columns)), np.nan)
        self._num_rows = 0
        self.begin()

    def begin(self) -> None:
        self._num_ticks, self._blocks, self._tokens = 0, 0.0, 0.0
        self._started, self._cpu = time.perf_counter(), time.process_time()

    def tick(self, table_blocks: float, record_tokens: float) -> None:
        """Lengths of the longest session after the tick; NaN where there are none."""
        self._num_ticks += 1
        self._blocks += table_blocks
        self._tokens += record_tokens

    def end(self, hours: float) -> None:
        """One more row; the next stretch begins. What this takes counts in neither."""
        cpu_ms = 1e3 * (time.process_time() - self._cpu) / (self._num_ticks * self._num_sessions)
        tick_ms = 1e3 * (time.perf_counter() - self._started) / self._num_ticks
        gc.collect()
        memory = (resident_mib(), malloc_in_use_kib(), sys.getallocatedblocks(), gpu_mib(self._device))
        lengths = (self._blocks / self._num_ticks, self._tokens / self._num_ticks)
        self._table[self._num_rows] = (hours, *memory, cpu_ms, tick_ms, *lengths)
        self._num_rows += 1
        self.begin()

    @property
    def num_rows(self) -> int:
        return self._num_rows

    def rows(self, start: int = 0) -> list[dict[str, float]]:
        """From row `start` on; without what the machine does not tell."""
        return [
            {
                name: round(float(value), 4)
                for name, value in zip(self._columns, row, strict=True)
                if not math.isnan(value)
            }
            for row in self._table[start : self._num_rows]
        ]


def without_malloc_caches(module: str) -> None:
    """Start this program anew, unless glibc was told before its start to cache no freed chunks."""
    if NO_CACHES not in os.environ.get("GLIBC_TUNABLES", ""):
        os.environ["GLIBC_TUNABLES"] = NO_CACHES
        os.execv(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]])


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class _Mallinfo2(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def malloc_in_use_kib() -> float:
    """What the C library has given out and not got back, in all its arenas; NaN before glibc 2.33."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return math.nan
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return (info.uordblks + info.hblkhd) / 1024


def gpu_mib(device: str) -> float:
    if device != "cuda":
        return math.nan
    import torch

    return torch.cuda.memory_allocated() / 2**20


def slopes(report: dict[str, Any], second_half: bool = False) -> dict[str, dict[str, float]]:
    """Of each figure that the machine told, over the stretches in which sessions were full, or the second
    half of them: where something that fills up is full."""
    rows = report["stretches"][report["slopes_from_row"] :]
    rows = rows[len(rows) // 2 if second_half else 0 :]
    found = {figure: slope(rows, figure) for figure in FIGURES}
    return {figure: values for figure, values in found.items() if values is not None}


def slope(rows: list[dict[str, float]], figure: str) -> dict[str, float] | None:
    """Mean, and least-squares rise per hour with its 95 % interval.

    Stretches next to each other are alike (the machine's load comes and goes, memory rises in pages), so the
    interval is Newey and West's (Econometrica 55, 1987) with `NUM_LAGS` lags, and Student's t.
    """
    points = [(row["hours"], row[figure]) for row in rows if figure in row]
    if len(points) < 8:
        return None
    x, y = np.array(points).T
    from_mean = x - x.mean()
    spread = float((from_mean**2).sum())
    deviations = y - y[0] - (y - y[0]).mean()  # exactly 0 where nothing moved
    rise = float((from_mean * deviations).sum()) / spread
    moments = from_mean * (deviations - rise * from_mean)
    variance = float((moments**2).sum())
    for lag in range(1, NUM_LAGS + 1):
        variance += 2 * (1 - lag / (NUM_LAGS + 1)) * float((moments[lag:] * moments[:-lag]).sum())
    n = len(points)
    error = math.sqrt(max(0.0, variance) * n / (n - 2)) / spread
    t = 1.96 + 2.4 / (n - 2)  # Student's t at 97.5 %, good to 1 % from 5 degrees of freedom on
    values = {"mean": y.mean(), "per_hour": rise, "low": rise - t * error, "high": rise + t * error}
    return {name: float(f"{value:.5g}") for name, value in values.items()}
