"""A day in minutes: hours of ticks as fast as the engine runs; does anything grow with a session's age?

    python -m bench.endless_day smollm2 [--hours 24]      the default model's LLM, its first 4 layers, CPU
    python -m bench.endless_day ultravox [--hours 24]     the tiny family with audio features, CPU
    python3 -m bench.endless_day qwen7b --hours 6 --limit-s 300             Qwen2.5-7B's LLM on an H200
    python3 -m bench.endless_day qwen2.5-omni-7b --hours 6 --limit-s 300    the same with its audio encoder
    python -m bench.endless_day MODEL --stock             vLLM's own streaming sessions, until they break
    python -m bench.endless_day MODEL --small             a dry run on this CPU of one that needs a GPU

A tick gives every session its work at once: some tokens (or one B of audio) and an answer. No time is
waited for: a tick begins when the last one is done. Figures are means over 48 stretches of the run; the
first is cut finer, for the plot. The first six are left out of the slopes: windows fill there, and the free
lists and pools of Python, torch and vLLM. Memory is read after each stretch and a collection, outside of its
time: resident; in use by malloc; Python's own blocks. glibc's caches of freed chunks, a few for each size and
thread, are switched off: they fill up over hours, and count as in use. At the end sessions that have only
just filled their windows take turns with the old ones, ten ticks each: what age costs, whatever else the
machine did meanwhile. One JSON in --out (bench/results/endless_day); endless_day_report.py makes the table
and the plot.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.endless_day_meter import (
    NUM_LEFT_OUT,
    NUM_STRETCHES,
    Meter,
    slopes,
    without_malloc_caches,
)
from bench.endless_day_plans import PLANS, SMALL, Chunks, Plan, make_model
from bench.endless_sessions import Ours, Stock
from bench.provenance import provenance
from engine.vllm.environment import prepare_process, repair_torch_companions
from engine.vllm.settings import VllmSettings

NUM_FINE = 24
NUM_PAIRS, PAIRS_LIMIT_S = 60, 60.0
HEAD = 30
GRACE_S = 120.0  # beyond the limit, for the comparison: then the process ends itself


class Run:
    """One run; `report` tells at any time what was measured so far."""

    def __init__(self, plan: Plan, is_stock: bool, directory: Path) -> None:
        self._plan, self._is_stock = plan, is_stock
        self._recipe, family = make_model(plan, directory)
        unbounded: dict[str, Any] = {"kv": "unbounded"} if is_stock else {}
        self._settings = VllmSettings(
            device=plan.device, max_sessions=2 * plan.num_sessions + 2, **(plan.settings | unbounded)
        )
        self._sessions = (Stock if is_stock else Ours)(self._recipe, self._settings, HEAD)
        self._chunks = Chunks(plan, family)
        self._names = [f"s{number}" for number in range(plan.num_sessions)]
        self._meter = Meter(plan.device, plan.num_sessions, NUM_STRETCHES + NUM_FINE + 2)
        self._num_ticks, self._took_s, self._first_row = 0, 0.0, 0
        self._broke: str | None = None
        self._old_by_young: dict[str, list[float]] | None = None

    def ticks(self, hours: float, limit_s: float) -> None:
        """All of the run's, as far as the limit allows."""
        plan, meter = self._plan, self._meter
        num_ticks = round(3600 * hours / plan.budget_s)
        whole = max(1, num_ticks // NUM_STRETCHES)
        fine = max(1, self._recipe.max_session_tokens // (plan.num_tokens + plan.num_decoded) // NUM_FINE)
        if self._is_stock:
            whole = fine
        started = time.perf_counter()
        meter.begin()
        while self._num_ticks < num_ticks and time.perf_counter() - started < limit_s:
            try:
                self._tick(self._names)
            except Exception as error:
                traceback.print_exc()
                self._broke = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                break
            meter.tick(*self._sessions.lengths())
            is_fine = self._num_ticks < whole and self._num_ticks % fine == 0 and meter.num_rows < NUM_FINE
            if is_fine or self._num_ticks % whole == 0:
                meter.end(self._num_ticks * plan.budget_s / 3600)
                if self._num_ticks <= NUM_LEFT_OUT * whole:
                    self._first_row = meter.num_rows
                if meter.num_rows % 8 == 0:
                    print(json.dumps(meter.rows(meter.num_rows - 1)), flush=True)
            self._took_s = time.perf_counter() - started
        if self._broke is None and not self._is_stock:
            self._old_by_young = self._compare()

    def _tick(self, names: Sequence[str]) -> None:
        self._num_ticks += 1
        works = {name: self._chunks.take(i, self._num_ticks) for i, name in enumerate(names)}
        self._sessions.tick(works, self._plan.num_decoded)

    def _compare(self) -> dict[str, list[float]]:
        """What a tick of the old sessions takes, as a part of the young ones': mean, 95 % interval."""
        num_ticks = self._num_ticks
        young = [f"young {name}" for name in self._names]
        settings = self._settings
        full = settings.window_tokens + settings.max_sink_tokens + settings.compaction_slack_tokens
        self._timed(young, -(-full // self._plan.num_tokens))
        ratios: list[tuple[float, float]] = []
        started = time.perf_counter()
        while len(ratios) < NUM_PAIRS and time.perf_counter() - started < PAIRS_LIMIT_S:
            aged, fresh = self._timed(self._names, 10), self._timed(young, 10)
            ratios.append((math.log(aged[0] / fresh[0]), math.log(aged[1] / fresh[1])))
        self._num_ticks = num_ticks
        if len(ratios) < 2:
            return {}
        return {name: _interval([pair[i] for pair in ratios]) for i, name in enumerate(("tick", "host_cpu"))}

    def _timed(self, names: Sequence[str], number: int) -> tuple[float, float]:
        started, cpu = time.perf_counter(), time.process_time()
        for _ in range(number):
            self._tick(names)
        return time.perf_counter() - started, time.process_time() - cpu

    def report(self) -> dict[str, Any]:
        return {
            "what": "vLLM's own streaming sessions" if self._is_stock else "compacted sessions",
            "plan": asdict(self._plan),
            **provenance(self._plan.device),
            "max_model_len": self._sessions.max_model_len,
            "trained_len": self._recipe.max_session_tokens,
            "hours": round(self._num_ticks * self._plan.budget_s / 3600, 3),
            "tokens_of_a_session": self._sessions.num_tokens(),
            "ticks": self._num_ticks,
            "took_s": round(self._took_s, 1),
            "broke": self._broke,
            "old_by_young": self._old_by_young,
            "slopes_from_row": self._first_row,
            "stretches": self._meter.rows(),
        }


def _interval(logs: list[float]) -> list[float]:
    mean = sum(logs) / len(logs)
    error = math.sqrt(sum((x - mean) ** 2 for x in logs) / (len(logs) - 1) / len(logs))
    return [round(math.exp(mean + t * error), 4) for t in (0.0, -2.0, 2.0)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", choices=list(PLANS))
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--limit-s", type=float, default=3600.0, help="stop after so long, wherever it is")
    parser.add_argument("--sessions", type=int)
    parser.add_argument("--audio-every", type=int, help="ticks from one chunk of audio to a session's next")
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("bench/results/endless_day"))
    options = parser.parse_args()
    without_malloc_caches("bench.endless_day")
    changes: dict[str, Any] = {"num_sessions": options.sessions, "audio_every": options.audio_every}
    changes = {name: value for name, value in changes.items() if value} | (SMALL if options.small else {})
    plan = replace(PLANS[options.model], **changes)
    path = options.out / f"{plan.model}{'_stock' if options.stock else ''}{'_small' * options.small}.json"
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    prepare_process(plan.device)
    repair_torch_companions()
    with tempfile.TemporaryDirectory() as directory:
        run = Run(plan, options.stock, Path(directory) / "model")

        def finish(broke: str | None = None) -> None:
            report = run.report() | ({} if broke is None else {"broke": broke})
            path.write_text(json.dumps(report, indent=1) + "\n")
            shown = {key: value for key, value in report.items() if key != "stretches"}
            print(json.dumps(shown | {"slopes": slopes(report)}, indent=1), flush=True)

        def give_up() -> None:
            finish(f"hung: a step did not return in {GRACE_S:g} s")
            os._exit(1)

        watchdog = threading.Timer(options.limit_s + GRACE_S, give_up)
        watchdog.daemon = True
        watchdog.start()
        run.ticks(options.hours, options.limit_s)
        finish()
    os._exit(0)  # after a broken step vLLM's own end may wait for ever


if __name__ == "__main__":
    main()
