"""An engine whose cached keys a test moves and looks at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from engine.models.family import EngineRecipe
from engine.vllm.settings import VllmSettings

W, BLOCK, TOKEN = 400, 16, 17


def start(directory: Path, dtype: str, max_tokens: int) -> Any:
    """A windowed engine whose window holds all that these tests feed, driven step by step."""
    from engine.vllm.core import SessionCore
    from engine.vllm.loading import load
    from tests.engine.vllm.stepper import Stepper

    settings = VllmSettings(max_sessions=4, kv_cache_bytes=48 << 20, dtype=dtype, window_tokens=W)
    recipe = EngineRecipe(directory, max_tokens, overrides={"skip_tokenizer_init": True})
    return Stepper(SessionCore(load(recipe, settings), None))


def mover_of(stepper: Any) -> Any:
    from engine.vllm.compaction.mover import KeyMover
    from tests.engine.vllm.sink_window.recording import runner_of

    return KeyMover(runner_of(stepper.core._core))


def blocks(stepper: Any, session: str) -> list[int]:
    from tests.engine.vllm.sink_window.recording import blocks_of

    (ids,) = blocks_of(stepper.scheduler, session)
    return ids


def caches(stepper: Any) -> torch.Tensor:
    """[layers, blocks, heads, 2, packed block]: keys, then values."""
    from tests.engine.vllm.sink_window.recording import kv_caches

    return torch.stack([cache.flatten(2).unflatten(2, (2, -1)) for cache in kv_caches(stepper.core._core)])
