"""What a loaded model takes of its device, and how many sessions that leaves room for."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearBase
from vllm.v1.engine.core import EngineCore

from engine.engine import EngineError
from engine.models.published import checkpoint_name
from engine.vllm.sink_window.spec import blocks_per_session

logger = logging.getLogger(__name__)

_SOME = torch.empty(1)  # of a layer without a tensor called weight (quantised)
_ADVICE = (
    "give the KV cache more memory (--engine-kv-cache-gib), lower --engine-window-tokens, "
    "--engine-max-sink-tokens or --engine-max-chunk-tokens, or halve it with --engine-kv-dtype fp8"
)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes, where nothing else is said."""

    weights: int
    session_kv: int  # the most one session ever holds
    session_tokens: int  # that many
    pool: int  # all of the KV cache
    num_sessions: int  # whole ones in the pool
    num_slots: int  # sessions the engine was asked to hold
    encoder_cache: int  # of encoded audio that waits to be taken in
    encoder_tokens: int

    @classmethod
    def of(cls, core: EngineCore) -> Footprint:
        scheduler: Any = core.scheduler
        config, kv = core.vllm_config, scheduler.kv_cache_config
        num_blocks = scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        pool = sum(tensor.size for tensor in kv.kv_cache_tensors)
        blocks = blocks_per_session(kv, config)
        executor: Any = core.model_executor
        model = executor.driver_worker.worker.get_model()
        encoder_tokens = (
            scheduler.encoder_cache_manager.cache_size if config.model_config.is_multimodal_model else 0
        )
        embedding = config.model_config.get_inputs_embeds_size() * config.model_config.dtype.itemsize
        return cls(
            weights=_weights(model, config.model_config.dtype.itemsize),
            session_kv=blocks * pool // num_blocks,
            session_tokens=blocks * scheduler.block_size,
            pool=pool,
            num_sessions=(num_blocks - 1) // blocks,
            num_slots=scheduler.max_num_running_reqs,
            encoder_cache=encoder_tokens * embedding,
            encoder_tokens=encoder_tokens,
        )

    def table(self) -> str:
        """For the operator's eyes."""
        rows = [
            ("weights", size(self.weights), ""),
            ("KV of a session", size(self.session_kv), f"at most {self.session_tokens:,} tokens"),
            (
                "KV pool",
                size(self.pool),
                f"room for {self.num_sessions:,} sessions; {self.num_slots:,} slots",
            ),
        ]
        if self.encoder_tokens:
            rows.append(("encoder cache", size(self.encoder_cache), f"{self.encoder_tokens:,} tokens"))
        return "\n".join(f"  {name:<17}{amount:>11}  {note}".rstrip() for name, amount, note in rows)

    def check(self) -> None:
        """Raises EngineError where not one session fits."""
        if self.num_sessions < 1:
            raise EngineError(
                f"the KV cache of {size(self.pool)} cannot hold one session, which takes up to "
                f"{size(self.session_kv)} ({self.session_tokens:,} tokens) beside {size(self.weights)} of "
                f"weights: {_ADVICE}"
            )


def _weights(model: torch.nn.Module, dtype_bytes: int) -> int:
    """On a CPU vLLM packs linear layers' weights for its kernels and leaves empty tensors in their place."""
    held = sum(p.numel() * p.element_size() for p in model.parameters())
    linear = (module for module in model.modules() if isinstance(module, LinearBase))
    packed = (m.input_size * m.output_size for m in linear if not getattr(m, "weight", _SOME).numel())
    return held + dtype_bytes * sum(packed)


def report(core: EngineCore, model_dir: Path) -> None:
    """Log the table. Raises EngineError where the engine can serve nobody."""
    footprint = Footprint.of(core)
    footprint.check()
    logger.info("%s, memory on its device\n%s", checkpoint_name(model_dir), footprint.table())


def explained(error: ValueError) -> EngineError | None:
    """vLLM's refusal of a pool that is too small, in our words; None for any other error."""
    text = str(error)
    if "for the cache blocks" not in text and "larger than the available KV cache" not in text:
        return None
    return EngineError(f"the device has no room for the KV cache of one session: {_ADVICE}. (vLLM: {text})")


def size(num_bytes: int) -> str:
    gib = num_bytes / (1 << 30)
    return f"{gib:.1f} GiB" if gib >= 1 else f"{num_bytes / (1 << 20):.1f} MiB"
