"""A day in minutes: hours of ticks as fast as the engine runs; does anything grow with a session's age?

    python -m bench.endless_day smollm2 [--hours 24]      the default model's LLM, its first 4 layers, CPU
    python -m bench.endless_day ultravox [--hours 24]     the tiny family with audio features, CPU
    VLLM_USE_FLASHINFER_SAMPLER=0 python3 -m bench.endless_day qwen7b --hours 6 --limit-s 330   an H200
    python -m bench.endless_day MODEL --stock             vLLM's own streaming sessions, until they break

A tick gives every session its work at once: some tokens (or a second of audio) and an answer. No time is
waited for: a tick begins when the last one is done. Figures are means over 48 stretches of the run, the first
two left out (sessions fill their windows there); a slope is a least-squares line through them with its 95 %
interval. At the end sessions that have only just filled their windows take turns with the old ones, ten ticks
each: what age costs, whatever else the machine did meanwhile. One JSON in --out (bench/results/endless_day);
endless_day_report.py makes the table and the plot.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from bench.endless_sessions import Ours, Stock
from engine.models.family import EngineRecipe
from engine.types import Features
from engine.vllm.environment import prepare_process, repair_torch_companions
from engine.vllm.settings import VllmSettings

NUM_STRETCHES, NUM_LEFT_OUT, NUM_PAIRS = 48, 2, 60
FIGURES = ("rss_mib", "gpu_mib", "host_cpu_ms_per_chunk", "tick_ms", "table_blocks", "record_tokens")


@dataclass(frozen=True)
class Plan:
    """What one run does."""

    model: str
    device: Literal["cpu", "cuda"]
    budget_s: float  # B: what one tick stands for
    num_sessions: int
    num_tokens: int  # taken in per tick; with audio, about as many
    num_decoded: int
    settings: dict[str, Any]
    with_audio: bool = False


PLANS = {
    "smollm2": Plan(
        "smollm2",
        "cpu",
        2.0,
        2,
        4,
        1,
        dict(kv_cache_bytes=256 << 20, window_tokens=1024, max_batch_tokens=512),
    ),
    "ultravox": Plan(
        "ultravox",
        "cpu",
        1.0,
        2,
        8,
        1,
        dict(kv_cache_bytes=32 << 20, window_tokens=256, max_sink_tokens=32, compaction_slack_tokens=128),
        with_audio=True,
    ),
    "qwen7b": Plan("qwen7b", "cuda", 2.0, 16, 50, 1, dict(window_tokens=1024, max_batch_tokens=2048)),
}
NUM_SMOLLM2_LAYERS = 4
HEAD = 30


def recipe_of(plan: Plan, directory: Path) -> EngineRecipe:
    if plan.model == "ultravox":
        from tests.support.ultravox_checkpoint import build
        from tests.support.ultravox_family import TinyUltravox

        return TinyUltravox(build(directory)).engine_recipe()
    overrides = {"skip_tokenizer_init": True}
    if plan.model == "smollm2":
        return EngineRecipe(first_layers(directory), 8192, overrides=overrides)
    from transformers import Qwen2Config

    from bench.windowed_engine_gpu import QWEN2_5_7B

    config = Qwen2Config(**QWEN2_5_7B, architectures=["Qwen2ForCausalLM"], dtype="bfloat16")
    config.save_pretrained(directory)
    return EngineRecipe(directory, 32_768, load_format="dummy", overrides=overrides)


def first_layers(directory: Path) -> Path:
    """SmolLM2 cut down to its first layers: the same code and shapes, a seventh of the time."""
    from safetensors.torch import load_file, save_file

    from engine.models import bundles
    from engine.models.prepare import prepare

    cache = Path(os.environ.get("METRONOME_CACHE_DIR", "~/.cache/metronome")).expanduser()
    whole = prepare(bundles.SMOLLM2, cache)
    config = json.loads((whole / "config.json").read_text()) | {"num_hidden_layers": NUM_SMOLLM2_LAYERS}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    dropped = tuple(f"model.layers.{i}." for i in range(NUM_SMOLLM2_LAYERS, 30))
    weights = load_file(next(whole.glob("*.safetensors")))
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith(dropped)}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


class Chunks:
    """What the sessions take in: made once, used in turn, so that the driver's own cost is small and flat."""

    def __init__(self, plan: Plan, directory: Path) -> None:
        self._made: list[tuple[tuple[int, ...], tuple[Features, ...]]] = []
        if not plan.with_audio:
            for number in range(64):
                tokens = tuple(10 + (37 * number + 11 * i) % 2000 for i in range(plan.num_tokens))
                self._made.append((tokens, ()))
            return
        import numpy as np

        from engine.types import Hearing, TurnMode
        from tests.support.ultravox_family import TinyUltravox

        family, mode = TinyUltravox(directory), TurnMode.CONTINUOUS
        for number in range(16):
            audio = np.random.default_rng(number).normal(0, 0.1, 16_000).astype(np.float32)
            (intake,) = family.hear([Hearing("a", family.new_ear(), audio, True)])
            opening = family.open_turn(mode)
            features = tuple(replace(f, offset=f.offset + len(opening)) for f in intake.features)
            self._made.append(((*opening, *intake.token_ids, *family.close_turn(mode)), features))

    def take(self, number: int) -> tuple[tuple[int, ...], tuple[Features, ...]]:
        return self._made[number % len(self._made)]


class Meter:
    """Sums over one stretch of the run."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._page = os.sysconf("SC_PAGE_SIZE")
        self.rows: list[dict[str, float]] = []
        self.begin()

    def begin(self) -> None:
        self._started, self._cpu, self._ticks = time.perf_counter(), time.process_time(), 0

    def tick(self) -> None:
        self._ticks += 1

    def end(self, hours: float, sessions: Any) -> None:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * self._page
        num_chunks = self._ticks * self._plan.num_sessions
        row = {
            "hours": hours,
            "rss_mib": resident / 2**20,
            "host_cpu_ms_per_chunk": 1e3 * (time.process_time() - self._cpu) / num_chunks,
            "tick_ms": 1e3 * (time.perf_counter() - self._started) / self._ticks,
            **sessions.lengths(),
        }
        if self._plan.device == "cuda":
            import torch

            row["gpu_mib"] = torch.cuda.memory_allocated() / 2**20
        self.rows.append({name: round(value, 4) for name, value in row.items()})
        self.begin()


def slope(rows: list[dict[str, float]], figure: str) -> dict[str, float] | None:
    """Per hour, with its 95 % interval (Student's t over the stretches)."""
    points = [(row["hours"], row[figure]) for row in rows[NUM_LEFT_OUT:] if figure in row]
    if len(points) < 5:
        return None
    xs, ys = [x for x, _ in points], [y for _, y in points]
    n, mean_x, mean_y = len(points), sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    rise = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    residual = sum((y - mean_y - rise * (x - mean_x)) ** 2 for x, y in points)
    error = math.sqrt(residual / (n - 2) / spread)
    t = 1.96 + 2.4 / (n - 2)  # Student's t at 97.5 %, good to 1 % from 5 degrees of freedom on
    values = {"mean": mean_y, "per_hour": rise, "low": rise - t * error, "high": rise + t * error}
    return {name: float(f"{value:.5g}") for name, value in values.items()}


def run(plan: Plan, hours: float, limit_s: float, is_stock: bool, directory: Path) -> dict[str, Any]:
    recipe = recipe_of(plan, directory)
    unbounded: dict[str, Any] = {"kv": "unbounded"} if is_stock else {}
    settings = VllmSettings(
        device=plan.device, max_sessions=2 * plan.num_sessions + 2, **(plan.settings | unbounded)
    )
    sessions = (Stock if is_stock else Ours)(recipe, settings, HEAD)
    chunks, meter = Chunks(plan, directory), Meter(plan)
    num_ticks = round(3600 * hours / plan.budget_s)
    per_stretch, broke, tick = max(1, num_ticks // NUM_STRETCHES), None, 0
    if is_stock:
        per_stretch = max(1, recipe.max_session_tokens // (plan.num_tokens + plan.num_decoded) // 24)
    names = [f"s{number}" for number in range(plan.num_sessions)]
    started = time.perf_counter()
    meter.begin()
    while tick < num_ticks and time.perf_counter() - started < limit_s and broke is None:
        try:
            works = {name: chunks.take(31 * number + tick) for number, name in enumerate(names)}
            sessions.tick(works, plan.num_decoded)
        except Exception as error:
            traceback.print_exc()
            broke = f"{type(error).__name__}: {error}"
            break
        tick += 1
        meter.tick()
        if tick % per_stretch == 0:
            meter.end(tick * plan.budget_s / 3600, sessions)
            if len(meter.rows) % 8 == 0:
                print(json.dumps(meter.rows[-1]), flush=True)
    old = {"hours": round(tick * plan.budget_s / 3600, 3), "tokens_of_a_session": sessions.num_tokens()}
    took_s = round(time.perf_counter() - started, 1)
    return {
        "what": "vLLM's own streaming sessions" if is_stock else "compacted sessions",
        "plan": asdict(plan),
        "machine": machine(plan),
        "max_model_len": sessions.max_model_len,
        "trained_len": recipe.max_session_tokens,
        **old,
        "ticks": tick,
        "took_s": took_s,
        "broke": broke,
        "old_by_young": None if is_stock else old_by_young(plan, settings, sessions, chunks, names),
        "slopes": {figure: slope(meter.rows, figure) for figure in FIGURES},
        "stretches": meter.rows,
    }


def old_by_young(
    plan: Plan, settings: VllmSettings, sessions: Any, chunks: Chunks, old: list[str]
) -> dict[str, list[float]]:
    """What a tick of the old sessions takes, as a part of the young ones': mean, 95 % interval."""
    young = [f"young {name}" for name in old]
    full = settings.window_tokens + settings.max_sink_tokens + settings.compaction_slack_tokens
    tick = 0

    def run_ticks(names: list[str], number: int) -> tuple[float, float]:
        nonlocal tick
        started, cpu = time.perf_counter(), time.process_time()
        for _ in range(number):
            tick += 1
            works = {name: chunks.take(31 * i + tick) for i, name in enumerate(names)}
            sessions.tick(works, plan.num_decoded)
        return time.perf_counter() - started, time.process_time() - cpu

    run_ticks(young, -(-full // plan.num_tokens))
    ratios: list[tuple[float, float]] = []
    for _ in range(NUM_PAIRS):
        aged, fresh = run_ticks(old, 10), run_ticks(young, 10)
        ratios.append((math.log(aged[0] / fresh[0]), math.log(aged[1] / fresh[1])))
    return {name: interval([pair[i] for pair in ratios]) for i, name in enumerate(("tick", "host_cpu"))}


def interval(logs: list[float]) -> list[float]:
    mean = sum(logs) / len(logs)
    error = math.sqrt(sum((x - mean) ** 2 for x in logs) / (len(logs) - 1) / len(logs))
    return [round(math.exp(mean + t * error), 4) for t in (0.0, -2.0, 2.0)]


def machine(plan: Plan) -> str:
    if plan.device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model", choices=list(PLANS))
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--limit-s", type=float, default=3600.0, help="stop after so long, wherever it is")
    parser.add_argument("--sessions", type=int)
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("bench/results/endless_day"))
    options = parser.parse_args()
    changes = {"num_sessions": options.sessions, "device": options.device}
    plan = replace(PLANS[options.model], **{name: value for name, value in changes.items() if value})
    prepare_process(plan.device)
    repair_torch_companions()
    with tempfile.TemporaryDirectory() as directory:
        report = run(plan, options.hours, options.limit_s, options.stock, Path(directory) / "model")
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"{plan.model}{'_stock' if options.stock else ''}.json"
    (options.out / name).write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({key: value for key, value in report.items() if key != "stretches"}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
