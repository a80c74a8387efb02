"""A session's ticks: what runs, how late it was, what the client is told of it. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass

from engine.events import Tick
from engine.types import SAMPLE_RATE


@dataclass(slots=True)
class _Running:
    due: float
    num_samples: int
    num_tokens: int = 0
    lateness_s: float | None = None  # set when the work that was due is complete


class Ticks:
    """At most one runs. Times are seconds of the caller's clock."""

    def __init__(self) -> None:
        self._running: _Running | None = None
        self._seq = 0
        self._worst_s: float | None = None  # lateness since the last sample

    @property
    def is_running(self) -> bool:
        return self._running is not None

    def begin(self, due: float, num_samples: int) -> None:
        """Audio that was due is taken in."""
        self._running = _Running(due, num_samples)

    def begin_answer(self, now: float) -> None:
        """An answer goes on: it is late only where its playback runs dry, see `Answer.take_lateness`."""
        self._running = _Running(now, 0, lateness_s=0.0)

    def decoded(self, num_tokens: int) -> None:
        if self._running is not None:
            self._running.num_tokens += num_tokens

    def answered(self, now: float) -> None:
        """What was due is complete: the answer has begun."""
        if self._running is not None:
            self._running.lateness_s = now - self._running.due

    def end(self, now: float, kv_tokens: int) -> Tick:
        """Only where one runs."""
        running, self._running = self._running, None
        assert running is not None
        if running.lateness_s is None:
            running.lateness_s = now - running.due
        self._seq += 1
        self._worst_s = max(self._worst_s or 0.0, running.lateness_s)
        return Tick(
            seq=self._seq,
            audio_ms=round(1000 * running.num_samples / SAMPLE_RATE),
            lateness_ms=round(1000 * running.lateness_s, 1),
            tokens=running.num_tokens,
            kv_tokens=kv_tokens,
        )

    def take_sample(self, now: float, waiting_since: float | None, answer_s: float | None) -> float | None:
        """Worst lateness in seconds since the last call, the age of what is still open included.

        `waiting_since`: when audio that waits became due; `answer_s`: an answer's lateness. None when no work
        was due: silent sessions must not hide the busy ones.
        """
        worst, self._worst_s = self._worst_s, None
        found = [value for value in (worst, answer_s) if value is not None]
        if waiting_since is not None:
            found.append(now - waiting_since)
        if self._running is not None and self._running.lateness_s is None:
            found.append(now - self._running.due)
        return max(found, default=None)
