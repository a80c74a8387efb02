"""All that sink-window attention owes on one H200, in one call: figures, logits, kernel tests, a second life.

    VLLM_USE_FLASHINFER_SAMPLER=0 python -m bench.windowed_engine_all --out DIR [--budget-s 560]
    python -m bench.windowed_engine_all --small --out DIR          a dry run on the CPU

Each part is a process with a time limit; one that fails or that the time left has no room for costs only
itself. Parts that measure time run alone; those that only check run at once. DIR gets one JSON and one log,
written after each stage; a table comes last on stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Part:
    name: str
    arguments: list[str]  # of python
    takes_s: int  # on an H200, with the start
    result: str | None = None  # the file it writes
    process: subprocess.Popen[bytes] | None = None
    outcome: str = "not run"


def plan(out: Path, small: bool) -> list[list[Part]]:
    """Stages, the most valuable first; a stage's parts run at once."""
    device = ["--device", "cpu"] if small else []

    def engine(part: str, takes_s: int, *ages: int) -> Part:
        arguments = ["-m", "bench.windowed_engine_gpu", "--parts", part, "--out", str(out)]
        arguments += ["--small"] if small else ["--ages", *map(str, ages)]
        return Part(part, arguments, takes_s, f"windowed_engine_{part}.json")

    def logits(study: str, takes_s: int) -> Part:
        result = f"logits_{study}.json"
        arguments = ["-m", "bench.windowed_engine_logits", study, "--out", str(out / result), *device]
        return Part(f"logits_{study}", arguments, takes_s, result)

    def tests(name: str, takes_s: int, marker: str) -> Part:
        # Without our ini file, whose plugins the GPU host lacks.
        arguments = ["-m", "pytest", "-c", os.devnull, "--rootdir", ".", "--import-mode=importlib"]
        arguments += ["-p", "no:cacheprovider", "-W", "ignore", "-q", "-m", marker, "tests/kernels"]
        return Part(name, arguments, takes_s)

    rebuild = ["-m", "bench.windowed_engine_rebuild", "--out", str(out / "rebuild.json"), *device]
    checks = [
        logits("7b", 170),
        logits("mrope", 110),
        Part("rebuild", rebuild, 150, "rebuild.json"),
        tests("kernel_tests_gpu", 120, "gpu"),
        tests("kernel_tests", 170, "not gpu"),
    ]
    stages = [
        [engine("windowed", 150, 1024, 4096, 8192)],
        checks,
        [engine("unbounded", 120, 1024, 4096, 8192)],
        [engine("fp8", 110, 4096)],
        [engine("piecewise", 110, 4096)],
    ]
    if small:
        stages = [[part for part in stage if part.name not in ("logits_7b", "fp8")] for stage in stages]
    return stages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=560.0)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", nargs="+", help="names of parts")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.budget_s
    done: list[Part] = []
    with tempfile.TemporaryDirectory() as directory:
        own = Path(directory)  # the parts' files: a GPU call brings few back
        for stage in plan(own, options.small):
            stage = [part for part in stage if options.only is None or part.name in options.only]
            run(stage, deadline, own, options.out / "log.txt")
            done += stage
            found = {part.name: {"outcome": part.outcome, "result": results(part, own)} for part in done}
            (options.out / "windowed_engine_all.json").write_text(json.dumps(found, indent=1) + "\n")
        for line in table(done, own):
            print(line)


def run(stage: list[Part], deadline: float, out: Path, log_path: Path) -> None:
    started = time.monotonic()
    path = os.pathsep.join((os.environ.get("PYTHONPATH", ""), ".", "tests/kernels"))
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
    with log_path.open("ab") as log:
        for part in stage:
            if started + 0.7 * part.takes_s > deadline:
                part.outcome = "no time left"
                continue
            command = [sys.executable, *part.arguments]
            target = (out / f"{part.name}.log").open("wb")
            part.process = subprocess.Popen(command, stdout=target, stderr=target, env=environment)
        for part in stage:
            if part.process is None:
                continue
            limit = min(started + 1.6 * part.takes_s, deadline)
            try:
                status = part.process.wait(max(1.0, limit - time.monotonic()))
                part.outcome = "done" if status == 0 else f"exit status {status}"
            except subprocess.TimeoutExpired:
                part.process.kill()
                part.process.wait()
                part.outcome = "out of time"
            part.outcome += f" after {time.monotonic() - started:.0f} s"
            print(part.name, part.outcome, flush=True)
            own = out / f"{part.name}.log"
            log.write(f"==== {part.name}: {part.outcome}\n".encode() + own.read_bytes()[-200_000:])
            if "done" not in part.outcome:
                print(own.read_text(errors="replace")[-1500:], flush=True)


def results(part: Part, out: Path) -> Any:
    path = out / (part.result or "none")
    return json.loads(path.read_text()) if part.result and path.is_file() else None


def table(parts: list[Part], out: Path) -> list[str]:
    lines = ["", "== outcome"]
    for part in parts:
        lines.append(f"{part.name:18} {part.outcome}")
        if "tests" in part.name:
            own = out / f"{part.name}.log"
            lines += [f"    {line}" for line in own.read_text(errors="replace").splitlines()[-3:]]
        for row in (results(part, out) or {"rows": []})["rows"]:
            lines.append("    " + brief(row))
    return lines


def brief(row: dict[str, Any]) -> str:
    skipped = ("part", "kv", "mean_ms", "steps", "kv_blocks_used", "longest_ms")
    return " ".join(f"{name}={value}" for name, value in row.items() if name not in skipped)


if __name__ == "__main__":
    main()
