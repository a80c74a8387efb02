"""The published families at full size on a GPU, random weights: 64 sessions stream real speech in real time.

    python -m bench.families_gpu --family qwen2.5-omni-7b [--seconds 120] [--weights fp8] [--kv-dtype fp8]
    python -m bench.families_gpu --small         a dry run of every line: a tiny model on this CPU

Several families on one GPU, one after the other: families_gpu_all.py. Here one family, through conductor,
sessions, tick scheduler and engine, as the server runs them, without sockets, and after the server's own
rehearsal. Each session is fed recordings of people in 20 ms frames, from a place of its own, in continuous
mode: every B each takes its audio in and decodes. Writes families_NAME.json into --out.

Weights are vLLM's random ones, uniform in [-0.001, 0.001]: time does not depend on their values, with two
exceptions, both on the dear side: answers never stop by themselves, so every tick decodes all it may; and a
MoE router with such weights spreads tokens evenly over its experts, so that a small batch reads more of them
than with trained ones. Sizes of the models: families_checkpoint.py, minicpmo_checkpoint.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from bench import families_checkpoint, minicpmo_checkpoint
from bench.families_late import Late
from bench.families_probe import Clock, Probe, ProbedEngine
from bench.provenance import provenance
from engine.conductor import Conductor
from engine.config import SessionConfig
from engine.engine import EngineError
from engine.events import Error, Tick
from engine.models import published
from engine.models.family import EngineRecipe, Family
from engine.outputs import Close
from engine.rehearsal import rehearse
from engine.scheduler import MAX_BATCH, TickSample, TickScheduler
from engine.session import Session
from engine.types import SAMPLE_RATE, TurnMode
from engine.vllm.environment import prepare_process, repair_torch_companions
from engine.vllm.settings import VllmSettings

SPEECH = Path(__file__).parents[1] / "tests" / "data" / "speech"
FAMILIES = (*families_checkpoint.FAMILIES, "minicpm-o-4.5", "minicpm-o-2.6")
FRAME = SAMPLE_RATE // 50  # 20 ms
WARM_UP_S = 8.0  # of streaming, before anything counts: kernels are compiled in their first steps
NUM_SLOTS = 8  # as the server has them
GATE_LIMIT_S = 450.0
LATE_SHOWN = 6000  # characters of the report of late compiles that are printed; the file has it all
KV_MIB = {  # of one session at W = 1024 and S up to 256, in bf16; the start's table says the same
    "qwen2.5-omni-7b": 99,
    "qwen2.5-omni-3b": 64,
    "qwen3-omni-30b-a3b": 170,
    "minicpm-o-4.5": 255,
    "minicpm-o-2.6": 99,
}


QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@dataclass
class Figures:
    """Of the measured time."""

    lateness_s: list[float] = field(default_factory=list)
    num_misses: int = 0
    ticks: int = 0
    tokens: int = 0
    audio_ms: int = 0
    ended: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    loop_late_ms: float = 0.0  # the worst: a feeder that is late itself measures nothing
    is_on: bool = False

    def on_sample(self, sample: TickSample, _now: float) -> None:
        if self.is_on:
            self.lateness_s += sample.lateness_s
            self.num_misses += sample.num_misses

    def deliver(self, item: Any) -> None:
        match item:
            case Tick() if self.is_on:
                self.ticks += 1
                self.tokens += item.tokens
                self.audio_ms += item.audio_ms
            case Close():
                self.ended.append(str(item.error))
            case Error():
                self.errors.append(item.message)

    def report(self, seconds: float, num_sessions: int) -> dict[str, Any]:
        ordered = sorted(1e3 * value for value in self.lateness_s)
        return {
            "lateness_ms": {q: round(ordered[int(f * (len(ordered) - 1))], 2) for q, f in QUANTILES.items()}
            if ordered
            else None,
            "samples": len(ordered),
            "misses": self.num_misses,
            "ticks": self.ticks,
            "tokens": self.tokens,
            "audio_taken_in_fraction": round(self.audio_ms / (1e3 * seconds * num_sessions), 3),
            "ended": self.ended,
            "errors": self.errors[:5],
            "feeder_late_ms": round(self.loop_late_ms, 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, default=FAMILIES[0])
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120.0, help="measured, after the warm-up")
    parser.add_argument("--weights", choices=("checkpoint", "fp8"), default="checkpoint")
    parser.add_argument("--kv-dtype", choices=("model", "fp8"), default="model")
    parser.add_argument("--max-batch-tokens", type=int, default=2048)
    parser.add_argument(
        "--eager", action="store_true", help="starts faster, runs slower: to see if it starts"
    )
    parser.add_argument("--kv-gib", type=float, help="a fixed KV pool, instead of what the GPU has left")
    parser.add_argument("--kv-fitting", action="store_true", help="a KV pool for these sessions, no larger")
    parser.add_argument(
        "--gate", type=Path, help="ready, it writes GATE.ready and waits for GATE, which may hold the seconds"
    )
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU: a dry run")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    device = "cpu" if options.small else "cuda"
    prepare_process(device)
    repair_torch_companions()
    kv_gib = options.kv_gib
    if options.small:
        kv_gib = 0.25
    elif options.kv_fitting:
        kv_gib = (options.sessions + 2) * KV_MIB[options.family] / 1024
    settings = VllmSettings(
        device=device,
        max_sessions=options.sessions + 1,
        max_batch_tokens=options.max_batch_tokens,
        kv_cache_bytes=None if kv_gib is None else round(kv_gib * (1 << 30)),
        # With a fixed pool nothing but vLLM's check of what is free at the start looks at this.
        gpu_memory_utilization=0.85 if kv_gib is None else 0.02,
        eager=True if options.eager or options.small else None,
        weights=options.weights,
        kv_dtype=options.kv_dtype,
    )
    with tempfile.TemporaryDirectory() as directory:
        family = make_family(options.family, Path(directory), device, small=options.small)
        result = asyncio.run(measure(family, settings, options.sessions, options.seconds, options.gate))
    result = {"family": options.family} | provenance(device) | result
    options.out.mkdir(parents=True, exist_ok=True)
    suffix = "_fp8" if "fp8" in (options.weights, options.kv_dtype) else ""
    path = options.out / f"families_{options.family}{suffix}{'_small' if options.small else ''}.json"
    late = {"late": result.pop("late")}
    path.write_text(json.dumps(result | late, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    print(json.dumps(late)[:LATE_SHOWN], flush=True)


def make_family(name: str, directory: Path, device: str, *, small: bool) -> Family:
    if name.startswith("minicpm"):
        from tests.support.tiny_minicpmo import changes as tiny

        version = name.removeprefix("minicpm-o-")
        minicpmo_checkpoint.write(version, directory, tiny(version) if small else None)
    elif small:
        from tests.support.tiny_omni import changes

        families_checkpoint.write(name, directory, changes(name))
    else:
        families_checkpoint.write(name, directory)
    return published.load(str(directory), device=device)


async def measure(
    family: Family, settings: VllmSettings, num_sessions: int, seconds: float, gate: Path | None
) -> dict[str, Any]:
    probe = Probe(Clock(on_device=settings.device == "cuda"))
    probe.listen(family)
    recipe: EngineRecipe = replace(family.engine_recipe(), load_format="dummy")
    engine = ProbedEngine(recipe, settings)
    engine.probe = probe
    figures = Figures()
    budget_s = family.info.budget_s
    detector: Any = None  # neither in manual nor in continuous mode there is anything to detect
    conductor = Conductor(
        family, lambda: engine, TickScheduler(budget_s, NUM_SLOTS, MAX_BATCH), detector, figures.on_sample
    )
    started = time.monotonic()
    await conductor.start()
    start_s = time.monotonic() - started
    while engine.footprint is None:  # noqa: ASYNC110 - the probe is attached right after the start
        await asyncio.sleep(0.01)
    print(f"started in {start_s:.0f} s\n{engine.footprint.table()}", flush=True)
    tasks = [asyncio.create_task(conductor.run()), asyncio.create_task(pulse(probe.late))]
    try:
        rehearsed = await rehearsed_as_served(conductor, family)
        if gate is not None:
            seconds = await pass_gate(gate, seconds)
        probe.late.phase = "warm-up"
        sessions = [open_session(conductor, family, i, figures) for i in range(num_sessions)]
        await feed(conductor, sessions, WARM_UP_S, figures)
        probe.late.phase = "measured"
        figures.is_on = True
        probe.begin()
        cpu_s = time.process_time()
        await feed(conductor, sessions, seconds, figures)
        cpu_s = time.process_time() - cpu_s
        figures.is_on = False
        result = {
            "start_s": round(start_s, 1),
            "rehearsal": rehearsed,
            "seconds": seconds,
            "process_cpu_cores": round(cpu_s / seconds, 2),
            **figures.report(seconds, num_sessions),
            **account(conductor, engine),
            "memory": device_memory() if settings.device == "cuda" else None,
            "parts": probe.report(),
            "late": probe.late_report(),
        }
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await conductor.close()
    parts = result["parts"]
    parts["busy_fraction"] = round(parts["device_ms"] / (1e3 * seconds), 3)
    options = {key: value for key, value in asdict(settings).items() if value is not None}
    return {"sessions": num_sessions, "budget_s": budget_s, "settings": options} | result


def account(conductor: Conductor, engine: ProbedEngine) -> dict[str, Any]:
    """Of the engine: its memory, what the sessions hold of it, and whether it failed."""
    limits, stats = engine.limits, engine.stats()
    return {
        "engine_failures": conductor.num_engine_failures,
        "footprint": asdict(engine.footprint),
        "kv_blocks_used": stats.kv_blocks_used,
        "kv_blocks": limits.num_kv_blocks,
        "blocks_per_session": limits.blocks_per_session,
    }


async def rehearsed_as_served(conductor: Conductor, family: Family) -> dict[str, Any]:
    """What the server does before its first caller. A failure is told, and the measuring goes on."""
    config = replace(session_config(conductor, family), mode=TurnMode.MANUAL)  # there is no detector
    started = time.monotonic()
    error = None
    try:
        await rehearse(conductor, config, MAX_BATCH + 1)
    except EngineError as failure:
        error = str(failure)
    took_s = round(time.monotonic() - started, 1)
    print(f"rehearsed in {took_s:.1f} s{f': {error}' if error else ''}", flush=True)
    return {"took_s": took_s, "together": MAX_BATCH + 1, "error": error}


async def pass_gate(gate: Path, seconds: float) -> float:
    """Wait until others have been measured; returns how long to measure."""
    gate.with_name(f"{gate.name}.ready").touch()
    async with asyncio.timeout(GATE_LIMIT_S):
        while not gate.exists():  # noqa: ASYNC110, ASYNC240 - another process opens it
            await asyncio.sleep(0.05)
    return float(gate.read_text() or seconds)  # noqa: ASYNC240 - a line, once


async def pulse(late: Late) -> None:
    """Lets a stall of the event loop be seen."""
    while True:
        late.beat()
        await asyncio.sleep(0.05)


def session_config(conductor: Conductor, family: Family) -> SessionConfig:
    engine = conductor.engine
    assert engine is not None
    return SessionConfig(
        mode=TurnMode.CONTINUOUS,
        instructions="",
        max_tokens=family.info.max_tokens_per_tick,
        max_session_tokens=engine.limits.max_session_tokens,
        max_head_tokens=engine.limits.max_head_tokens,
        budget_s=family.info.budget_s,
        backlog_limit_s=2 * family.info.budget_s,
    )


def open_session(conductor: Conductor, family: Family, number: int, figures: Figures) -> Session:
    config = session_config(conductor, family)
    session = Session(f"s{number}", family, config, time.monotonic())
    conductor.open(session, figures.deliver)
    return session


async def feed(conductor: Conductor, sessions: list[Session], seconds: float, figures: Figures) -> None:
    """Speech in real time to every session that lives, each from another place in the recordings."""
    files = sorted(SPEECH.glob("*.wav")) + sorted(SPEECH.glob("*.flac"))
    speech = np.concatenate([soundfile.read(path, dtype="int16", always_2d=True)[0][:, 0] for path in files])
    frames = speech[: len(speech) // FRAME * FRAME].reshape(-1, FRAME)
    start = time.monotonic()
    for tick in range(round(50 * seconds)):
        due = start + tick / 50
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        now = time.monotonic()
        if figures.is_on:
            figures.loop_late_ms = max(figures.loop_late_ms, 1e3 * (now - due))
        for number, session in enumerate(sessions):
            if conductor.scheduler.get(session.id) is not None:
                frame = frames[(tick + 397 * number) % len(frames)]
                conductor.carry_out(session, session.on_audio(frame.tobytes(), now))


def device_memory() -> dict[str, float]:
    import torch

    free, total = torch.cuda.mem_get_info()
    return {
        "total_gib": round(total / 2**30, 1),
        "used_gib": round((total - free) / 2**30, 1),
        "peak_of_torch_gib": round(torch.cuda.max_memory_reserved() / 2**30, 1),
    }


if __name__ == "__main__":
    main()
