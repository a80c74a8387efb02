"""The sizes of sink-window attention, and their way through vLLM's configuration to every part of ours."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

_KEY = "metronome_sink_window"


@dataclass(frozen=True, slots=True)
class SinkWindowOptions:
    """What bounds a session's KV."""

    window_tokens: int  # W, the query's own token counted
    max_sink_tokens: int  # cap on a session's S
    max_chunk_tokens: int  # of one session in one step

    def as_additional_config(self) -> dict[str, Any]:
        """For EngineArgs.additional_config, which vLLM carries along and hashes, but never reads."""
        return {_KEY: asdict(self)}

    def in_flight(self, vllm_config: Any) -> int:
        """The most tokens of one session that can be scheduled and not done."""
        per_step = min(self.max_chunk_tokens, vllm_config.scheduler_config.max_num_batched_tokens)
        return vllm_config.max_concurrent_batches * per_step

    @classmethod
    def of(cls, vllm_config: Any) -> SinkWindowOptions | None:
        """Those of an engine; None: it keeps everything."""
        found = vllm_config.additional_config.get(_KEY)
        return None if found is None else cls(**found)
