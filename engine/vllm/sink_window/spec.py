"""The KV cache spec of a windowed layer, and the manager that frees what no query will see again."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar

from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    UniformTypeKVCacheSpecs,
    replace_as,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from engine.vllm.sink_window.layout import gap_blocks, max_blocks
from engine.vllm.sink_window.options import SinkWindowOptions

AnySpec = TypeVar("AnySpec", bound=AttentionSpec)


@dataclass(frozen=True, kw_only=True)
class SinkWindowSpec(FullAttentionSpec):
    """A layer that keeps a session's first S tokens (S is the session's own) and its last W."""

    window_tokens: int
    max_sink_tokens: int
    in_flight_tokens: int  # the most one session may have scheduled and not done
    max_session_tokens: int

    @property
    def max_blocks(self) -> int:
        """The most blocks one session can hold of a layer."""
        return max_blocks(
            self.max_sink_tokens,
            self.window_tokens,
            self.in_flight_tokens,
            self.max_session_tokens,
            self.block_size,
        )

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        return self.max_blocks * self.page_size_bytes

    @classmethod
    def merge(cls, specs: list[SinkWindowSpec]) -> SinkWindowSpec:
        # vLLM takes an AssertionError, and no other, for "these layers need groups of their own".
        assert all(type(spec) is cls for spec in specs), "windowed layers do not mix with others in a group"
        own = {field.name for field in fields(cls)} - {field.name for field in fields(FullAttentionSpec)}
        values = {name: getattr(specs[0], name) for name in own}
        for spec in specs:
            found = {name: getattr(spec, name) for name in own}
            assert found == values, f"layers of one group differ in their window: {found}, {values}"
        plain = [replace_as(spec, FullAttentionSpec, drop=own) for spec in specs]
        return replace_as(FullAttentionSpec.merge(plain), cls, **values)


class SinkWindowManager(FullAttentionManager):
    """Block lists of sessions whose gap is freed; the list keeps its length, vLLM's null block fills the gap.

    `heads` maps request ids to S in tokens. The scheduler writes it when a session begins (0 where it did
    not); it goes with the session's blocks.
    """

    def __init__(self, kv_cache_spec: SinkWindowSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.max_admission_blocks_per_request = kv_cache_spec.max_blocks
        self.window_tokens = kv_cache_spec.window_tokens
        self.heads: dict[str, int] = {}

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        sinks = self.heads.get(request_id, 0)
        first, last = gap_blocks(sinks, processed_computed_tokens, self.window_tokens, self.block_size)
        self._remove_blocks_in_range(request_id, first, last)

    def pop_blocks_for_free(self, request_id: str) -> list:
        self.heads.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)


# Grouped with its own kind only; a subclass of FullAttentionSpec would else be grouped with those.
KVCacheSpecRegistry.register(SinkWindowSpec, SinkWindowManager)


def windowed(spec: AnySpec) -> AnySpec | SinkWindowSpec:
    """`AttentionBackend.customize_spec` of our backends: plain full attention is windowed, the rest stays."""
    config = get_current_vllm_config_or_none()
    options = None if config is None else SinkWindowOptions.of(config)
    if config is None or options is None or not is_plain_full_attention(spec):
        return spec
    return replace_as(
        spec,
        SinkWindowSpec,
        window_tokens=options.window_tokens,
        max_sink_tokens=options.max_sink_tokens,
        in_flight_tokens=options.in_flight(config),
        max_session_tokens=config.model_config.max_model_len,
    )


def is_plain_full_attention(spec: KVCacheSpec) -> bool:
    """Subclasses are other things: latent attention, learned sinks. So are layers that slide or see ahead."""
    return (
        type(spec) is FullAttentionSpec
        and spec.sliding_window is None
        and spec.attention_chunk_size is None
        and not spec.non_causal
    )


def blocks_per_session(kv_cache_config: KVCacheConfig, vllm_config: VllmConfig) -> int:
    """The most blocks of the pool that one session can hold, over all groups of layers."""
    total = 0
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            total += spec.max_memory_usage_pages(vllm_config)
        else:
            total += -(-spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes)
    return total
