"""Builds vLLM's EngineCore for a family's model, in this process and on the calling thread.

Importing this module imports vLLM (about 9 s on two cores): `environment.prepare_process` comes before.
"""

from __future__ import annotations

import gc
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.registry import ModelRegistry
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor

from engine.engine import EngineError
from engine.models.family import EngineRecipe
from engine.vllm import footprint
from engine.vllm.scheduler import AsyncParkingScheduler, ParkingScheduler
from engine.vllm.settings import VllmSettings, compaction, engine_arguments, max_model_len
from engine.vllm.sink_window import starting

logger = logging.getLogger(__name__)

VLLM_VERSION = "0.32.0"


def load(recipe: EngineRecipe, settings: VllmSettings) -> EngineCore:
    """Load the model. Raises EngineError where the options do not fit it, and whatever vLLM raises.

    A model whose sessions cannot be compacted is loaded again, for sessions that end at its trained length.
    """
    if vllm.__version__.split("+")[0] != VLLM_VERSION:
        raise EngineError(f"vLLM {VLLM_VERSION} is needed, {vllm.__version__} is installed")
    register_models(recipe.model_dir)
    starting.register(settings.device)
    core = _build(recipe, settings)
    reason = _why_not_compacted(core, recipe, settings)
    if reason is not None:
        logger.warning(
            "sessions end at %d tokens, for they cannot be compacted: %s",
            max_model_len(recipe, replace(settings, compaction_slack_tokens=0)) - 1,
            reason,
        )
    if reason is None or compaction(recipe, settings) is None:
        return core
    core.shutdown()
    del core
    gc.collect()
    return _build(recipe, replace(settings, compaction_slack_tokens=0))


def _build(recipe: EngineRecipe, settings: VllmSettings) -> EngineCore:
    scheduler_cls = AsyncParkingScheduler if settings.is_async else ParkingScheduler
    arguments = engine_arguments(recipe, settings, scheduler_cls)
    config = config_of(arguments)
    starting.check(config)
    _check_pool(config, recipe, settings)
    try:
        core = core_of(config)
    except ValueError as error:
        if (refusal := footprint.explained(error)) is not None:
            raise refusal from error
        if settings.sink_window is None or "Selected backend" not in str(error):
            raise
        raise EngineError(f"{starting.UNFIT}: {error}") from error
    starting.report(config, core.scheduler.kv_cache_config)  # pyright: ignore[reportAttributeAccessIssue]
    footprint.report(core, recipe.model_dir)
    return core


def config_of(arguments: dict[str, Any]) -> VllmConfig:
    """vLLM's configuration from EngineArgs' keyword arguments."""
    return EngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)


def core_of(config: VllmConfig) -> EngineCore:
    """Load the model and start vLLM's core on this thread, without any check of ours."""
    return _Core(config, Executor.get_class(config), log_stats=False)


def _why_not_compacted(core: EngineCore, recipe: EngineRecipe, settings: VllmSettings) -> str | None:
    """Where it is asked for: None if sessions are, else the reason."""
    if settings.sink_window is None or settings.compaction_slack_tokens == 0:
        return None
    if compaction(recipe, settings) is None:
        if settings.max_session_tokens is not None:
            return None  # the cap that was asked for comes first
        return (
            f"the window, the sinks and the slack need more than the {recipe.max_session_tokens} positions "
            "the model was trained for"
        )
    scheduler = core.scheduler
    assert isinstance(scheduler, ParkingScheduler)
    if not scheduler.is_compactable:
        return "not all of the model's layers have the same window"
    return core.model_executor.collective_rpc("unmovable_keys")[0]


class _Core(EngineCore):
    def shutdown(self) -> None:
        """Leave the device's memory to another engine of this process."""
        try:
            self.model_executor.collective_rpc("apply_model", args=(_let_go,))
        finally:
            super().shutdown()


def _let_go(model: torch.nn.Module) -> None:
    """A compiled model stays registered with torch for life, and its weights with it, unless it is told."""
    for module in model.modules():
        if isinstance(module, TorchCompileWithNoGuardsWrapper):
            module.cleanup()


def register_models(model_dir: Path) -> None:
    """Import the model's class here: vLLM would inspect it in a child process, which lacks our repairs."""
    path = model_dir / "config.json"
    if not path.is_file():
        raise EngineError(f"no model in {model_dir}: config.json is missing")
    for architecture in json.loads(path.read_text()).get("architectures") or ():
        if architecture == "MiniCPMO":  # vLLM's own needs the checkpoint's code
            from engine.vllm import minicpmo

            minicpmo.register()
            continue
        registered = ModelRegistry.models.get(architecture)
        if registered is not None:
            ModelRegistry.register_model(architecture, registered.load_model_cls())


def _check_pool(config: VllmConfig, recipe: EngineRecipe, settings: VllmSettings) -> None:
    """A pool that cannot hold one whole session would fail late, and in vLLM's words."""
    if settings.kv_cache_bytes is None:
        return
    model, parallel = config.model_config, config.parallel_config
    if model.is_hybrid or model.use_mla:
        return  # their caches are of another shape; vLLM has its own check
    dtype_bytes = 1 if settings.kv_dtype == "fp8" else model.dtype.itemsize
    token_bytes = (
        2 * model.get_num_layers(parallel) * model.get_num_kv_heads(parallel) * model.get_head_size()
    ) * dtype_bytes
    block_size = config.cache_config.block_size
    num_blocks = starting.max_session_blocks(config, block_size) + 1
    needed = num_blocks * block_size * token_bytes
    if settings.kv_cache_bytes < needed:
        raise EngineError(
            f"kv_cache_bytes={settings.kv_cache_bytes} cannot hold one session of "
            f"max_session_tokens={max_model_len(recipe, settings)}, which takes {needed}: "
            "raise the one or lower the other"
        )
