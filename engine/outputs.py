"""What a session's methods return, besides events for its client: things for others to carry out."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import SessionError
from engine.events import ServerEvent
from engine.types import Work


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
class Close:
    """End the session: tell the client why, close the socket, free everything."""

    error: SessionError


Output = ServerEvent | Submit | Cancel | EndGeneration | Close
