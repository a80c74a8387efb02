"""The attention kernels of an installed vLLM 0.32, loaded from their files without importing vLLM.

Importing vLLM takes many seconds, dozens of packages, and replaces Triton by a placeholder on the CPU. The
kernels need four names of it, stubbed here, so that the tests run them through Triton's interpreter and the
benchmark runs them from a bare copy of a few files.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl

HELPERS = "vllm.v1.attention.ops.triton_attention_helpers"


class KVQuantMode(enum.IntEnum):
    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4


def vllm_folder() -> Path | None:
    """Where vLLM's files lie, or None where it is not installed."""
    spec = importlib.util.find_spec("vllm")
    return (
        Path(next(iter(spec.submodule_search_locations)))
        if spec and spec.submodule_search_locations
        else None
    )


@cache
def stock_triton() -> ModuleType:
    """vLLM's triton_unified_attention module; its `unified_attention` launches the stock kernels."""
    folder = vllm_folder()
    if folder is None:
        raise ModuleNotFoundError("vLLM 0.32 is not installed")
    ops = folder / "v1/attention/ops"
    platform = ModuleType("platform")
    vars(platform).update(
        fp8_dtype=lambda: torch.float8_e4m3fn, is_device_capability_family=lambda family: family == 90
    )
    stubs = {
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": KVQuantMode},
    }
    with _modules({name: _stub(name, values) for name, values in stubs.items()}):
        helpers = _load("stock_attention_helpers", ops / "triton_attention_helpers.py")
        sys.modules[HELPERS] = helpers
        module = _load("stock_unified_attention", ops / "triton_unified_attention.py")
    vars(module)["helpers"] = helpers
    return module


@cache
def flash3() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """vLLM's FlashAttention-3: (flash_attn_varlen_func, get_scheduler_metadata). Needs a Hopper GPU."""
    folder = vllm_folder()
    if folder is None:
        raise ModuleNotFoundError("vLLM 0.32 is not installed")
    sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module("vllm_flash_attn.flash_attn_interface")
    except ImportError:  # the package's __init__ imports vLLM; without it, a namespace package does
        package = ModuleType("vllm_flash_attn")
        package.__path__ = [str(folder / "vllm_flash_attn")]
        sys.modules["vllm_flash_attn"] = package
        module = importlib.import_module("vllm_flash_attn.flash_attn_interface")
    finally:
        sys.path.remove(str(folder))
    if not module.FA3_AVAILABLE:
        raise ModuleNotFoundError(f"FlashAttention-3: {module.FA3_UNAVAILABLE_REASON}")
    return module.flash_attn_varlen_func, module.get_scheduler_metadata


def _stub(name: str, values: dict[str, Any]) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(values)
    return module


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"{path} is missing")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # triton looks a kernel's module up by its name
    spec.loader.exec_module(module)
    return module


@contextmanager
def _modules(stubs: dict[str, ModuleType]) -> Iterator[None]:
    """Put modules in place of vLLM's while its files load, then restore what was there."""
    names = [*stubs, "vllm", HELPERS, "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.ops"]
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        sys.modules[name] = stubs.get(name, ModuleType(name))
    # `import vllm.envs as envs` reads the attribute of the parent package.
    vars(sys.modules["vllm"])["envs"] = stubs["vllm.envs"]
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
