"""What a session is opened with: what its client chose, and the server's bounds around it."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.audio.endpoint import EndpointerConfig
from engine.types import SAMPLE_RATE, TurnMode


@dataclass(frozen=True, slots=True)
class SessionConfig:
    mode: TurnMode
    instructions: str
    sample_rate: int = SAMPLE_RATE  # of the client's PCM
    max_tokens: int = 256  # of one answer, until an update
    max_tokens_ceiling: int = 1024  # the most a client may ask for
    max_session_tokens: int | None = 4096  # None: no end
    max_head_tokens: int | None = None  # the longest head the engine keeps; None: any
    is_aloud: bool = False  # whether answers are spoken, until an update
    voice_rate: int | None = None  # samples a second of the server's voice; None: it has none
    budget_s: float = 2.0  # B
    backlog_limit_s: float = 4.0  # audio that may wait; 2 B unless an option says otherwise
    max_message_bytes: int = 1 << 20
    idle_limit_s: float = 300.0  # without audio
    max_age_s: float | None = None
    speech: EndpointerConfig = field(default_factory=EndpointerConfig)
