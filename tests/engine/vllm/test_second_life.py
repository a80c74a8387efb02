"""A compiled engine that is closed leaves no weights behind: another must fit into the same memory."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

# In a process of its own: torch's compiler and what it loads would stay in the tests' own.
PROGRAM = """
import gc, sys, warnings
from pathlib import Path

from engine.vllm.environment import prepare_process, repair_torch_companions

prepare_process("cpu", 1)
repair_torch_companions()
warnings.simplefilter("ignore")

import torch
from torch._subclasses.fake_tensor import FakeTensor
from bench.windowed_engine_gpu import SMALL, write_config
from engine.models.family import EngineRecipe
from engine.vllm.engine import VllmEngine
from engine.vllm.settings import VllmSettings

def num_weights():
    gc.collect()
    found = [o for o in gc.get_objects() if isinstance(o, torch.nn.Parameter)]
    return sum(1 for o in found if not isinstance(o, FakeTensor) and o.device.type != "meta")

model = Path(sys.argv[1]) / "model"
write_config(model, SMALL.model)
recipe = EngineRecipe(model, 2048, load_format="dummy", overrides={"skip_tokenizer_init": True})
settings = VllmSettings(
    max_sessions=4, max_session_tokens=255, max_batch_tokens=64, kv_cache_bytes=16 << 20, eager=False
)
engine = VllmEngine(recipe, settings)
engine.start(lambda results: None, lambda failure: None)
print("spared", gc.get_freeze_count() > 100_000)
engine.close()
print("still spared", gc.get_freeze_count())
print("weights", num_weights())
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for the CPU needs g++")
def test_a_closed_engine_leaves_no_weights(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "spared True\n" in done.stdout  # from the collector, while the engine runs
    assert "still spared 0\n" in done.stdout
    assert "weights 0\n" in done.stdout
