"""The checks of on_device.py, where there is a GPU, in a process of their own: this one runs on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_compaction_with_runner_v2_and_asynchronous_scheduling(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_USE_V2_MODEL_RUNNER"}
    environment["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    command = [sys.executable, "-m", "tests.engine.vllm.compaction.on_device", "--out", str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert not [row for row in json.loads(out.read_text())["rows"] if "failed" in row]
