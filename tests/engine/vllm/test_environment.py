"""What the process is told before torch and vLLM come; in processes of their own, as imports happen once."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COMMON = "from engine.vllm.environment import prepare_process, repair_torch_companions\n"


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", COMMON + code],
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_it_imports_neither_torch_nor_vllm():
    assert run("import sys; prepare_process('cpu'); print({'torch', 'vllm'} & set(sys.modules))") == "set()"


def test_no_network_no_child_no_statistics():
    names = (
        "VLLM_ENABLE_V1_MULTIPROCESSING HF_HUB_OFFLINE TRANSFORMERS_OFFLINE "
        "VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK"
    )
    code = f"import os; prepare_process('cpu'); print(*(os.environ[n] for n in '{names}'.split()))"
    assert run(code, HF_HUB_OFFLINE="0") == "0 1 1 1 1"


@pytest.mark.parametrize(
    "arguments,environment,expected",
    [
        ("'cpu'", {}, str(len(os.sched_getaffinity(0)))),
        ("'cpu'", {"OMP_NUM_THREADS": "7"}, "7"),
        ("'cpu', num_threads=3", {"OMP_NUM_THREADS": "7"}, "3"),
    ],
)
def test_threads(arguments, environment, expected):
    code = (
        f"import os; prepare_process({arguments})\n"
        "print(os.environ['OMP_NUM_THREADS'], os.environ['OMP_WAIT_POLICY'])"
    )
    assert run(code, **environment) == f"{expected} passive"


def test_the_v2_runner_stays_cudas():
    code = "import os; prepare_process('{}'); print(os.environ.get('VLLM_USE_V2_MODEL_RUNNER'))"
    assert run(code.format("cpu")) == "0"
    assert run(code.format("cuda")) == "None"


def test_transformers_is_usable_whatever_torchs_companions_are():
    code = (
        "prepare_process('cpu'); repair_torch_companions(); repair_torch_companions()\n"
        "from transformers import WhisperFeatureExtractor\n"
        "import torchvision.transforms\n"
        "from transformers.utils import is_mistral_common_available\n"
        "print(WhisperFeatureExtractor().hop_length, is_mistral_common_available())"
    )
    pytest.importorskip("torchvision", exc_type=ImportError)
    assert run(code) == "160 False"
