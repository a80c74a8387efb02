"""When sessions are compacted, and the way of that through vLLM's configuration."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

_KEY = "metronome_compaction"


@dataclass(frozen=True, slots=True)
class CompactionOptions:
    slack_tokens: int  # a gap of so many freed tokens is cut out; also the most that one turn in vLLM may add
    max_session_tokens: int | None = None  # a session's cap, evicted tokens counted; None: no end

    def as_additional_config(self) -> dict[str, Any]:
        """For EngineArgs.additional_config, which vLLM carries along and hashes, but never reads."""
        return {_KEY: asdict(self)}

    @classmethod
    def of(cls, vllm_config: Any) -> CompactionOptions | None:
        """Those of an engine; None: its sessions are never compacted."""
        found = vllm_config.additional_config.get(_KEY)
        return None if found is None else cls(**found)


def compacted_len(max_sink_tokens: int, window_tokens: int, slack_tokens: int, block_size_tokens: int) -> int:
    """The most tokens a compacted session's record in vLLM can have, that of the sampled token included.

    Between turns up to its sinks' blocks, a gap just too short to be cut out, and a window that begins
    anywhere in its first block; then one more turn.
    """
    sinks = -(-max_sink_tokens // block_size_tokens) * block_size_tokens
    parked = sinks + (slack_tokens - 1) + (window_tokens - 1) + (block_size_tokens - 1)
    return parked + slack_tokens + 1
