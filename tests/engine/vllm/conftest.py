"""Engines for the tests: one per test module, since vLLM's distributed state allows one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.vllm.environment import prepare_process, repair_torch_companions

prepare_process("cpu")
repair_torch_companions()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny random-weight Ultravox: text tokens and audio items."""
    from tests.support.ultravox_checkpoint import build

    return build(tmp_path_factory.mktemp("models") / "tiny-ultravox")


@pytest.fixture(scope="session")
def family(model_dir: Path):
    from tests.support.ultravox_family import TinyUltravox

    return TinyUltravox(model_dir)


@pytest.fixture(scope="module")
def engine_core(family) -> Iterator:
    from engine.vllm.loading import load
    from tests.engine.vllm.stepper import SETTINGS

    core = load(family.engine_recipe(), SETTINGS)
    yield core
    core.shutdown()


@pytest.fixture(scope="module", params=["sync", "async"])
def module_stepper(request: pytest.FixtureRequest, engine_core):
    """sync: the real model as the CPU runs it. async: two steps in flight as on CUDA, a model on paper."""
    from engine.vllm.core import SessionCore
    from tests.engine.vllm.paper_runner import async_core
    from tests.engine.vllm.stepper import Stepper

    return Stepper(SessionCore(engine_core if request.param == "sync" else async_core(engine_core), "audio"))


@pytest.fixture
def stepper(module_stepper) -> Iterator:
    """An engine core stepped by the test itself. Whatever a test did, all it held must be free after it."""
    module_stepper.start_test()
    yield module_stepper
    module_stepper.end_all()
    module_stepper.check_empty()
