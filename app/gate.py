"""Who enters: permits while the cap, the request slots and the KV pool have room for one more whole session.

Nobody waits in line and nobody inside is evicted: a cap below what is in flight only stops admission. A
refusal is a value, not an exception: being full is an ordinary answer, and being full is not being down.
Used from the event loop only.
"""

from __future__ import annotations

import random
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol

from engine.aimd import AimdLimit
from engine.conductor import Phase
from engine.engine import Engine

RefusalCode = Literal["at_capacity", "starting", "draining", "engine_failed"]
RefusalReason = Literal["load", "slots", "kv_cache", "starting", "draining", "engine_failed"]


class Server(Protocol):
    """What the gate must know of the conductor."""

    @property
    def phase(self) -> Phase: ...

    @property
    def engine(self) -> Engine | None: ...


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why not, for the wire (`code`, `message`, `retry_after_ms`) and for the counters (`reason`)."""

    code: RefusalCode
    reason: RefusalReason
    message: str
    retry_after_ms: int


class Permit:
    """The right to one session. Ends exactly once, however often `end` is called; also a context manager."""

    __slots__ = ("_on_end",)

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end: Callable[[], None] | None = on_end

    @property
    def ended(self) -> bool:
        return self._on_end is None

    def end(self) -> None:
        """Give the place back. Call it after `Engine.end`, so that what it reserved is free again."""
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()

    def __enter__(self) -> Permit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


class Gate:
    """Counts who is inside. `clock` gives seconds and `rng` the jitter; both are for tests to replace."""

    MIN_RETRY_MS, MAX_RETRY_MS, DEFAULT_RETRY_MS = 500, 60_000, 5_000
    TURNOVER_KEPT = 32  # recent ends of permits that the retry hint is derived from

    def __init__(
        self,
        limit: AimdLimit,
        max_sessions: int,
        server: Server,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._limit = limit
        self._max_sessions = max_sessions
        self._server = server
        self._clock = clock
        self._rng = rng or random.Random()
        self._ends: deque[float] = deque(maxlen=self.TURNOVER_KEPT)
        self._refusals: deque[float] = deque(maxlen=1024)  # at capacity, since the oldest end that is kept
        self.in_flight = 0
        self.num_admitted = 0
        self.refused: Counter[str] = Counter()

    @property
    def cap(self) -> int:
        """Sessions that may be in flight now, whatever bounds them."""
        return min((room for _, room in self._rooms()), default=0)

    @property
    def free(self) -> int:
        """Sessions that would be admitted now."""
        return max(0, self.cap - self.in_flight) if self._server.phase is Phase.READY else 0

    def enter(self) -> Permit | Refusal:
        """A permit at once, or a refusal at once."""
        if self._server.phase is not Phase.READY or self._server.engine is None:
            return self._refuse_for_phase()
        for reason, room in self._rooms():
            if self.in_flight >= room:
                return self._refuse_full(reason)
        self.in_flight += 1
        self.num_admitted += 1
        return Permit(self._on_end)

    def _rooms(self) -> list[tuple[RefusalReason, int]]:
        """Each bound and the sessions it would hold in all."""
        if self._server.engine is None:
            return []
        engine = self._server.engine.limits
        # Every session inside may grow to blocks_per_session, so that much is spoken for from its start.
        return [
            ("load", self._limit.whole_cap),
            ("slots", min(self._max_sessions, engine.max_sessions)),
            ("kv_cache", engine.num_kv_blocks // engine.blocks_per_session),
        ]

    def _on_end(self) -> None:
        self.in_flight -= 1
        self._ends.append(self._clock())

    def _refuse_full(self, reason: RefusalReason) -> Refusal:
        self.refused[reason] += 1
        self._refusals.append(self._clock())
        retry_ms = self.retry_after_ms()
        message = (
            f"All {self.cap} places of this server are taken ({self.in_flight} sessions running). "
            f"Please try again in about {max(1, round(retry_ms / 1000))} s."
        )
        return Refusal("at_capacity", reason, message, retry_ms)

    def _refuse_for_phase(self) -> Refusal:
        code: Literal["starting", "draining", "engine_failed"]
        match self._server.phase:
            case Phase.DRAINING:
                code, message = "draining", "The server is shutting down. Please connect to another one."
            case Phase.FAILED:
                code, message = "engine_failed", "The server's engine has failed. Please try again later."
            case _:
                code, message = "starting", "The server is still starting. Please try again shortly."
        self.refused[code] += 1
        return Refusal(code, code, message, self._jittered(self.DEFAULT_RETRY_MS))

    def retry_after_ms(self) -> int:
        """When a place may be had: recent mean time between free places, times those competing for the next.

        Jittered by half, so that refused clients do not come back together.
        """
        if not self._ends:
            return self._jittered(self.DEFAULT_RETRY_MS)
        now_s = self._clock()
        span_s = now_s - self._ends[0]
        while self._refusals and self._refusals[0] < self._ends[0]:
            self._refusals.popleft()
        rivals = max(1.0, len(self._refusals) / len(self._ends))
        return self._jittered(1000 * span_s / len(self._ends) * rivals)

    def _jittered(self, mean_ms: float) -> int:
        spread = self._rng.uniform(0.5, 1.5)
        return round(min(max(mean_ms * spread, self.MIN_RETRY_MS), self.MAX_RETRY_MS))
