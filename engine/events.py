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
    voice: bool  # whether answers are spoken
    voice_sample_rate: int | None  # of response.audio; None: the server has no voice
    limits: Limits


class SessionUpdated(_Event):
    type: Literal["session.updated"] = "session.updated"
    turn: str
    instructions: str
    max_tokens: int
    voice: bool
    voice_sample_rate: int | None


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


class ResponseAudio(_Event):
    """At most a second of the answer's sound: the next message is binary, PCM s16le mono."""

    type: Literal["response.audio"] = "response.audio"
    response_id: str
    text: str  # the words spoken in it
    duration_ms: int
    num_bytes: int


class ResponseAudioDone(_Event):
    """All of the answer's sound was sent."""

    type: Literal["response.audio.done"] = "response.audio.done"
    response_id: str
    duration_ms: int


class ResponseFlush(_Event):
    """The answer was interrupted: drop all of its sound that was not played yet."""

    type: Literal["response.flush"] = "response.flush"
    response_id: str


class ResponseHeard(_Event):
    """What the conversation keeps of an interrupted spoken answer; comes when the next turn is taken in."""

    type: Literal["response.heard"] = "response.heard"
    response_id: str
    text: str
    played_ms: int


class Warning(_Event):
    """Nothing is lost but what the message says; the session goes on.

    Codes: input_rate, audio_dropped, voice_failed, session_expiring, draining.
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
    | ResponseAudio
    | ResponseAudioDone
    | ResponseFlush
    | ResponseHeard
    | Warning
    | Error
    | Pong,
    Field(discriminator="type"),
]
