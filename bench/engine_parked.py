"""What parked sessions cost a step: vLLM's queue against ours, in turns on one engine.

    python -m bench.engine_parked [--rounds 12] [--out bench/results/engine_parked.json]

One session decodes while 0, 64 or 512 others wait for their next chunk. In "stock" rounds the waiting ones
lie in vLLM's own queue, as they would without our scheduler; in "ours" they are parked. Rounds alternate, so
that a slow minute of the machine meets both. The model is the tests' tiny one: a real model's forward takes
longer, the scheduler's part does not change with it.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.vllm.environment import prepare_process, repair_torch_companions

NUM_PARKED = (0, 64, 512)
STEPS_PER_ROUND = 48
WARM_UP_STEPS = 4  # of a round, not counted: the active session's prefill among them


class Clock:
    """Adds up the time spent inside a wrapped method, until asked."""

    def __init__(self) -> None:
        self.spent_s = 0.0

    def wrap(self, method: Callable) -> Callable:
        def timed(*args, **kwargs):
            started = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.spent_s += time.perf_counter() - started

        return timed

    def take(self) -> float:
        spent_s, self.spent_s = self.spent_s, 0.0
        return spent_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=12, help="of each queueing and number of parked sessions"
    )
    parser.add_argument("--out", type=Path, default=Path("bench/results/engine_parked.json"))
    options = parser.parse_args()
    prepare_process("cpu")
    repair_torch_companions()
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(Path(directory) / "model", options.rounds)
    report = {
        "what": "ms a step, one session decoding beside parked ones",
        "machine": f"{platform.processor() or platform.machine()}, {cpu_name()}",
        "steps_per_row": options.rounds * (STEPS_PER_ROUND - WARM_UP_STEPS),
        "rows": rows,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    for row in rows:
        print(row)


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else "unknown"


def measure(model_dir: Path, num_rounds: int) -> list[dict]:
    from engine.types import Work
    from engine.vllm.core import SessionCore
    from engine.vllm.loading import load
    from engine.vllm.settings import VllmSettings
    from tests.support.ultravox_checkpoint import build
    from tests.support.ultravox_family import TinyUltravox

    recipe = TinyUltravox(build(model_dir)).engine_recipe()
    settings = VllmSettings(
        max_sessions=max(NUM_PARKED) + 8,  # with every slot taken, vLLM would not look at its queue at all
        max_session_tokens=63,
        max_batch_tokens=2048,
        kv_cache_bytes=96 << 20,
    )
    core = SessionCore(load(recipe, settings), recipe.modality)
    scheduler, clock = core._scheduler, Clock()
    scheduler.schedule = clock.wrap(scheduler.schedule)
    scheduler.update_from_output = clock.wrap(scheduler.update_from_output)
    rows, num_parked = [], 0
    for target in NUM_PARKED:
        for number in range(num_parked, target):
            core.submit(Work(f"p{number}", 0, 0, (10 + number % 200, 11)))
        num_parked = target
        while core.has_work():
            core.step()
        samples: dict[str, list[tuple[float, float]]] = {"stock": [], "ours": []}
        for number in range(2 * num_rounds):
            queueing = ("stock", "ours")[number % 2]
            active = f"active {target} {number}"
            if queueing == "stock":
                into_queue(scheduler)
            core.submit(Work(active, 0, 0, (20, 21, 22), max_tokens=STEPS_PER_ROUND + 4))
            for step in range(STEPS_PER_ROUND):
                started = time.perf_counter()
                core.step()
                sample = (clock.take(), time.perf_counter() - started)
                if step >= WARM_UP_STEPS:
                    samples[queueing].append(sample)
            core.end(active, 0)
            if queueing == "stock":
                out_of_queue(scheduler)
            core.step()
            check(core.take_results())
        rows += [row(target, queueing, samples[queueing]) for queueing in samples]
    core.shutdown()
    return rows


def check(results: list) -> None:
    refused = [result.error for result in results if result.error is not None]
    if refused:
        raise RuntimeError(f"what was measured is no work: {refused[0]}")


def into_queue(scheduler: Any) -> None:
    """Put the parked where vLLM itself would have put them."""
    from engine.vllm.scheduler import ParkingScheduler

    stock: Any = super(ParkingScheduler, scheduler)
    for request in scheduler.parked.values():
        stock._enqueue_waiting_request(request)
    scheduler.parked.clear()


def out_of_queue(scheduler) -> None:
    requests = list(scheduler.kv_holding_waiting)
    scheduler.kv_holding_waiting.remove_requests(requests)
    scheduler.deferred_waiting.difference_update(requests)
    for request in requests:
        scheduler._enqueue_waiting_request(request)


def row(num_parked: int, queueing: str, samples: list[tuple[float, float]]) -> dict:
    scheduler_ms = sorted(1e3 * sample[0] for sample in samples)
    step_ms = sorted(1e3 * sample[1] for sample in samples)
    return {
        "parked": num_parked,
        "queueing": queueing,
        "scheduler_ms": spread(scheduler_ms),
        "step_ms": spread(step_ms),
    }


def spread(values: list[float]) -> dict[str, float]:
    deciles = statistics.quantiles(values, n=10)
    return {"p10": round(deciles[0], 4), "p50": round(deciles[4], 4), "p90": round(deciles[8], 4)}


if __name__ == "__main__":
    main()
