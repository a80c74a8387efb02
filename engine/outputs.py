"""What a session's methods return, besides events for its client: things for others to carry out."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import SessionError
from engine.events import ResponseAudio, ServerEvent
from engine.types import Utterance, Work


@dataclass(frozen=True, slots=True)
class Submit:
    """Give this to the engine."""

    work: Work


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop the session's running work in the engine."""

    generation: int


@dataclass(frozen=True, slots=True)
class EndGeneration:
    """Free what the engine holds of this generation."""

    generation: int


@dataclass(frozen=True, slots=True)
class Speak:
    """Give this to the voice."""

    utterance: Utterance


@dataclass(frozen=True, slots=True)
class Hush:
    """Forget the clause that waits for the voice."""


@dataclass(frozen=True, slots=True)
class Sound:
    """For the client: an event, and right behind it one binary message."""

    event: ResponseAudio
    pcm: bytes  # s16le mono at `VOICE_RATE`


@dataclass(frozen=True, slots=True)
class Close:
    """End the session: tell the client why, close the socket, free everything."""

    error: SessionError


ToClient = ServerEvent | Sound | Close
Output = ToClient | Submit | Cancel | EndGeneration | Speak | Hush
