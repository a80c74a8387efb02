"""What a real engine computed, step by step, and its KV cache laid open."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def runner_of(engine_core: Any) -> Any:
    return engine_core.model_executor.driver_worker.worker.model_runner


@contextmanager
def hidden_states(engine_core: Any) -> Iterator[list[torch.Tensor]]:
    """The model's output of each step, [tokens of the step, hidden size], as the steps are run."""
    recorded: list[torch.Tensor] = []
    hook = runner_of(engine_core).model.register_forward_hook(
        lambda _module, _inputs, output: recorded.append(output.clone())
    )
    try:
        yield recorded
    finally:
        hook.remove()


def kv_caches(engine_core: Any) -> list[torch.Tensor]:
    """One tensor per layer, [num_blocks, ...]."""
    layers = runner_of(engine_core).compilation_config.static_forward_context.values()
    return [layer.kv_cache for layer in layers if isinstance(getattr(layer, "kv_cache", None), torch.Tensor)]


def blocks_of(scheduler: Any, session: str) -> list[list[int]]:
    """Block ids by KV group of the session's request, 0 where freed."""
    (request_id,) = (name for name in scheduler.requests if name.startswith(f"{session}:"))
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    return [[block.block_id for block in manager.req_to_blocks[request_id]] for manager in managers]


def poison_all_but(engine_core: Any, keep: set[int]) -> None:
    """NaN into every block that is not in `keep`: free ones, the null block, other sessions'."""
    for cache in kv_caches(engine_core):
        others = torch.tensor([block for block in range(cache.shape[0]) if block not in keep])
        cache[others] = float("nan")


def heal(engine_core: Any) -> None:
    """Zeros in place of NaN."""
    for cache in kv_caches(engine_core):
        cache.nan_to_num_(0.0)
