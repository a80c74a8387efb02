"""What a session is opened with: what its client chose, and the server's bounds around it."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.audio.endpoint import EndpointerConfig
from engine.events import Limits, SessionCreated
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
    max_dropped_tokens: int | None = None  # the most that can be taken back of an answer; None: any
    is_aloud: bool = False  # whether answers are spoken, until an update
    voice_rate: int | None = None  # samples a second of the server's voice; None: it has none
    budget_s: float = 2.0  # B
    backlog_limit_s: float = 4.0  # audio that may wait; 2 B unless an option says otherwise
    max_message_bytes: int = 1 << 20
    idle_limit_s: float = 300.0  # without audio
    max_age_s: float | None = None
    speech: EndpointerConfig = field(default_factory=EndpointerConfig)

    def created(self, session_id: str, model: str, *, is_aloud: bool) -> SessionCreated:
        """What the client is told at first."""
        limits = Limits(
            max_message_bytes=self.max_message_bytes,
            max_backlog_ms=round(1000 * self.backlog_limit_s),
            max_session_tokens=self.max_session_tokens,
            max_response_tokens=self.max_tokens_ceiling,
            expires_in_s=self.max_age_s,
        )
        return SessionCreated(
            id=session_id,
            model=model,
            sample_rate=self.sample_rate,
            budget_ms=round(1000 * self.budget_s),
            turn=self.mode,
            instructions=self.instructions,
            max_tokens=self.max_tokens,
            voice=is_aloud,
            voice_sample_rate=self.voice_rate,
            limits=limits,
        )
