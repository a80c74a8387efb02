"""The tiny model's engine with compaction: W = 64, S up to 20, blocks of 16, a slack of 64 tokens."""

from __future__ import annotations

from typing import Any

from engine.vllm.settings import VllmSettings
from tests.engine.vllm.sink_window.windowed import SINKS, settings

SLACK = 64
HEAD = SINKS


def compacted(**changes: Any) -> VllmSettings:
    given: dict[str, Any] = {"max_session_tokens": None, "compaction_slack_tokens": SLACK}
    return settings(**(given | changes))
