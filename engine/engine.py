"""The seam to what computes. `engine/vllm/` and `engine/null.py` keep what is promised here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.types import Result, Work


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What a started engine can hold."""

    max_sessions: int  # request slots; parked sessions occupy one
    max_session_tokens: int | None  # a session may not grow beyond this; None: sessions have no end
    num_kv_blocks: int
    block_size_tokens: int
    blocks_per_session: int  # the most one session can hold: what a permit reserves
    max_batch_tokens: int  # tokens of one engine step
    max_head_tokens: int | None = None  # the longest head that is kept; None: any
    max_dropped_tokens: int | None = None  # how far a session can go back by `Work.keep_tokens`; None: any


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Figures of a running engine; cheap to read from any thread."""

    kv_blocks_used: int
    num_sessions: int
    num_steps: int
    last_step_s: float


class EngineError(Exception):
    """The engine is not usable: it failed to start, or died. Ends every session in it."""


OnResults = Callable[[Sequence[Result]], None]
OnFailure = Callable[[EngineError], None]


class Engine(Protocol):
    """One thread of its own drives it; every method is safe from the event loop's.

    `on_results` and `on_failure` are called on the engine's thread (at most once a step): hand over with
    `loop.call_soon_threadsafe`. After `on_failure` every call is a no-op but `close`.
    """

    @property
    def limits(self) -> EngineLimits: ...

    def stats(self) -> EngineStats: ...

    def start(self, on_results: OnResults, on_failure: OnFailure) -> None:
        """Load, warm up, begin stepping. Blocks, may take minutes. Raises EngineError."""
        ...

    def submit(self, batch: Sequence[Work]) -> None:
        """Queue works for the next step; one that cannot run comes back REFUSED, never as an exception."""
        ...

    def cancel(self, session_id: str, generation: int) -> None:
        """Stop the session's work within a step; its last result is CANCELLED. Idle: no-op."""
        ...

    def end(self, session_id: str, generation: int) -> None:
        """Free all the session holds. No result of it follows. Unknown sessions: no-op."""
        ...

    def close(self) -> None:
        """Stop the thread and free the device. Idempotent."""
        ...
