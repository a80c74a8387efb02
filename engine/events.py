"""What a session says: the server's side of the wire protocol (design.md, `/v1/stream`).

A session returns these; a socket writes `model_dump_json()`. Every field is always present, nulls included,
because strict clients die on a missing one. Times on the wire are milliseconds.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Event(BaseModel):
    model_config = ConfigDict(frozen=True)


class Limits(_Event):
    """What the session may do, so that a client need not guess."""

    max_message_bytes: int
    max_backlog_ms: int  # waiting audio beyond this is dropped, oldest first
    max_session_tokens: int | None  # None: no limit on the session's length
    max_response_tokens: int
    expires_in_s: float | None  # None: no limit on the session's age


class SessionCreated(_Event):
    type: Literal["session.created"] = "session.created"
    id: str
    model: str
    sample_rate: int
    budget_ms: int
    turn: str
    instructions: str
    max_tokens: int
    limits: Limits


class SessionUpdated(_Event):
    type: Literal["session.updated"] = "session.updated"
    turn: str
    instructions: str
    max_tokens: int


class Tick(_Event):
    """One per tick with work; figures of the session alone."""

    type: Literal["tick"] = "tick"
    seq: int
    audio_ms: int  # audio taken in by this tick
    lateness_ms: float
    tokens: int  # tokens decoded by this tick
    kv_tokens: int  # tokens of the session in the KV cache


class SpeechStarted(_Event):
    type: Literal["speech.started"] = "speech.started"
    audio_ms: int  # position in the session's audio


class SpeechStopped(_Event):
    type: Literal["speech.stopped"] = "speech.stopped"
    audio_ms: int


class InputTranscript(_Event):
    type: Literal["input.transcript"] = "input.transcript"
    text: str


class ResponseCreated(_Event):
    type: Literal["response.created"] = "response.created"
    response_id: str


class ResponseTextDelta(_Event):
    type: Literal["response.text.delta"] = "response.text.delta"
    response_id: str
    delta: str


ResponseReason = Literal["stop", "length", "cancelled", "interrupted", "failed"]


class ResponseDone(_Event):
    """`interrupted`: the user spoke; `cancelled`: the client asked; `length`: max_tokens reached."""

    type: Literal["response.done"] = "response.done"
    response_id: str
    reason: ResponseReason
    tokens: int


class Warning(_Event):
    """Nothing is lost but what the message says; the session goes on.

    Codes: input_rate, audio_dropped, session_expiring, draining.
    """

    type: Literal["warning"] = "warning"
    code: str
    message: str


class Error(_Event):
    """What went wrong and what to do. The session goes on unless a close follows."""

    type: Literal["error"] = "error"
    code: str
    status: int
    message: str
    retry_after_ms: int | None = None


class Pong(_Event):
    type: Literal["pong"] = "pong"


ServerEvent = Annotated[
    SessionCreated
    | SessionUpdated
    | Tick
    | SpeechStarted
    | SpeechStopped
    | InputTranscript
    | ResponseCreated
    | ResponseTextDelta
    | ResponseDone
    | Warning
    | Error
    | Pong,
    Field(discriminator="type"),
]
