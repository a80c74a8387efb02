"""Without a CUDA device the kernels run in Triton's interpreter, whatever imported triton before."""

import importlib
from pathlib import Path

import pytest
import torch
import triton.language as tl
from triton_interpreter import interpret

ROOT = Path(__file__).parents[2]

if not torch.cuda.is_available():
    kernels = [f"kernels.{path.parent.name}.kernel" for path in ROOT.glob("kernels/*/kernel.py")]
    torch.set_num_threads(1)
    interpret(tl, tl.standard, *(importlib.import_module(name) for name in kernels))


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
