"""`metronome serve --model DIRECTORY`, as an operator starts it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiny_omni

pytestmark = pytest.mark.vllm

LIMIT_S = 240.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def until_ready(port: int, process: subprocess.Popen, log: Path) -> dict[str, Any]:
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                return json.loads(answer.read())
        except OSError:  # not listening yet, or 503 while it loads
            time.sleep(0.1)
    raise AssertionError(log.read_text())


def test_a_checkpoints_directory_is_served_and_its_memory_told(tmp_path: Path):
    log, port = tmp_path / "log", free_port()
    command = [
        str(Path(sys.executable).parent / "metronome"),
        "serve",
        "--port",
        str(port),
        "--device",
        "cpu",
    ]
    checkpoint = tiny_omni.cached(tiny_omni.NAMES[0])
    command += ["--model", str(checkpoint)]
    command += ["--max-sessions", "2", "--engine-kv-cache-gib", "0.2"]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | {"NO_COLOR": "1"})
    try:
        assert until_ready(port, process, log)["model"] == "qwen2.5-omni"
        for row in ("weights ", "KV of a session ", "KV pool ", "encoder cache "):
            assert row in log.read_text()
        assert f"{checkpoint}, memory on its device" in log.read_text()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/capacity", timeout=5) as answer:
            assert json.loads(answer.read())["checkpoint"] == str(checkpoint)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(90)
    assert process.returncode == 0


def test_what_cannot_be_served_is_said_before_anything_is_loaded(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    command = [str(Path(sys.executable).parent / "metronome"), "serve", "--port", "0", "--model"]
    run = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=LIMIT_S)
    assert run.returncode == 1
    assert "LlamaForCausalLM, which is not served here; known architectures: " in run.stderr
