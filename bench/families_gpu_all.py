"""Several families on one GPU, measured one after the other, each alone, within one bounded call.

    python -m bench.families_gpu_all --total-s 570 [--families A B C] [--seconds 120] [--out DIR]
    python -m bench.families_gpu_all --small --seconds 4 --sessions 4       a dry run on this CPU

Loading takes longer than measuring, so all load at once: a process each (families_gpu.py), with a KV pool for
its sessions and no more. A process that is ready waits at its gate without work, and holds nothing of the GPU
but memory. A gate opens when the measuring before it has ended; what is left of `--total-s` is shared among
those who wait. A family that fails, or is not ready in time, is left out. Logs and results go into --out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bench.families_gpu import FAMILIES, WARM_UP_S

STAGGER_S = 2.0  # between two starts
CLOSE_S = 4.0  # from the last frame to the result
LEAST_S = 20.0  # a shorter measuring says nothing
GRACE_S = 20.0  # for a measuring that takes longer than it should


@dataclass
class Runner:
    """One family's process."""

    name: str
    process: subprocess.Popen[bytes]
    gate: Path
    result: Path

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    @property
    def is_ready(self) -> bool:
        return self.gate.with_name(f"{self.gate.name}.ready").exists()

    def open_gate(self, seconds: float) -> None:
        new = self.gate.with_name(f"{self.gate.name}.new")
        new.write_text(f"{seconds:.1f}")
        new.rename(self.gate)

    def kill(self) -> None:
        """It and its compilers."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--families",
        nargs="+",
        choices=FAMILIES,
        default=["qwen3-omni-30b-a3b", "minicpm-o-4.5", "qwen2.5-omni-7b"],
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="measured of each, if time allows")
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--ready-s", type=float, default=230.0, help="who is not ready by then is left out")
    parser.add_argument("--total-s", type=float, default=570.0, help="of this program")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--small", action="store_true", help="tiny models on the CPU: a dry run")
    options = parser.parse_args()
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    runners: list[Runner] = []
    try:
        for number, name in enumerate(options.families):
            runners.append(start(name, number, options))
            time.sleep(STAGGER_S)
        ready = wait_ready(runners, began, options.ready_s)
        for number, runner in enumerate(ready):
            left_s = options.total_s - (time.monotonic() - began)
            seconds = share(left_s, len(ready) - number, options.seconds)
            tell(began, f"{runner.name}: {seconds:.0f} s to measure")
            if seconds >= min(LEAST_S, options.seconds):
                runner.open_gate(seconds)
                wait_measured(runner, WARM_UP_S + seconds + CLOSE_S + GRACE_S)
            tell(began, f"{runner.name}: {'measured' if runner.result.exists() else 'no result'}")
            runner.kill()
    finally:
        for runner in runners:
            runner.kill()
    for runner in runners:
        print(summary(runner, options.out), flush=True)


def start(name: str, number: int, options: argparse.Namespace) -> Runner:
    gate = (options.out / f"{name}.gate").absolute()
    result = options.out / f"families_{name}{'_small' if options.small else ''}.json"
    for path in (gate, gate.with_name(f"{gate.name}.ready"), result):
        path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "bench.families_gpu", "--family", name, "--kv-fitting"]
    command += ["--sessions", str(options.sessions), "--seconds", str(options.seconds)]
    command += ["--gate", str(gate), "--out", str(options.out)] + ["--small"] * options.small
    threads = max(1, len(os.sched_getaffinity(0)) // len(options.families))
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_PORT": str(24_000 + 200 * number),  # else two processes may choose the same free port
    }
    with (options.out / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment | dict(os.environ),
            start_new_session=True,
        )
    return Runner(name, process, gate, result)


def wait_ready(runners: list[Runner], began: float, limit_s: float) -> list[Runner]:
    """Those who are ready, in the order of the command. The others end: their start would disturb."""
    told: set[str] = set()
    while time.monotonic() - began < limit_s:
        for runner in runners:
            if runner.name not in told and (runner.is_ready or not runner.is_alive):
                told.add(runner.name)
                tell(began, f"{runner.name}: {'ready' if runner.is_ready else 'failed'}")
        if len(told) == len(runners):
            break
        time.sleep(0.2)
    ready = [runner for runner in runners if runner.is_ready and runner.is_alive]
    for runner in runners:
        if runner not in ready:
            runner.kill()
    return ready


def wait_measured(runner: Runner, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while runner.is_alive and not runner.result.exists() and time.monotonic() < end:
        time.sleep(0.1)
    with contextlib.suppress(subprocess.TimeoutExpired):
        runner.process.wait(CLOSE_S)


def share(left_s: float, num_waiting: int, wanted_s: float) -> float:
    """Seconds to measure, when so many families have to share what is left."""
    return min(wanted_s, left_s / num_waiting - WARM_UP_S - 2 * CLOSE_S)


def tell(began: float, what: str) -> None:
    print(f"{time.monotonic() - began:6.1f} s  {what}", flush=True)


def summary(runner: Runner, out: Path) -> str:
    """A family's figures in a few lines, or the end of its log."""
    if not runner.result.exists():
        log = (out / f"{runner.name}.log").read_text(errors="replace").replace("\r", "\n")
        return f"== {runner.name} has no result; its log ends with\n{log[-1500:]}"
    found = json.loads(runner.result.read_text())
    late = {phase: (c["count"], c["took_s"]) for phase, c in found["late"]["compiled"].items()}
    slow = [
        (event["phase"], event["at_s"], event["took_s"], event["what"])
        for event in found["late"]["slow"][:12]
    ]
    keys = ("seconds", "start_s", "rehearsal", "lateness_ms", "misses", "ticks", "audio_taken_in_fraction")
    lines = [json.dumps({key: found[key] for key in (*keys, "errors", "memory")})]
    lines += [json.dumps(found["parts"]), f"late compiles {late}", f"slow {slow[:12]}"]
    return "\n".join([f"== {runner.name}", *lines])


if __name__ == "__main__":
    main()
