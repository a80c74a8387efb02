"""How much of an answer's sound was played: by the client's reports, else by what was sent in real time.

Arithmetic only. Times are seconds of the caller's clock, durations are samples at `VOICE_RATE`.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.voice.voice import VOICE_RATE

REPORT_LIFE_S = 2.0  # clients report four times a second; older than this, a report says nothing about now
_TOLERANCE_SAMPLES = VOICE_RATE // 50  # the last 20 ms of a clause are silence


@dataclass(frozen=True, slots=True)
class _Clause:
    text: str
    num_samples: int


class Playback:
    """The sound of one answer, clause after clause. What a client reports is bounded, never trusted.

    A clause that was begun may be sent in parts: only what was sent can have been played.
    """

    def __init__(self, starts_at: float) -> None:
        self.num_samples = 0  # sent in all
        self._clauses: list[_Clause] = []
        self._dry_at = starts_at  # when all that was sent has been played, if that begins as soon as it can
        self._reported: int | None = None
        self._reported_at = 0.0
        self._flushed_at: float | None = None

    def begin(self, text: str, num_samples: int) -> None:
        """The next clause, and how long all of its sound is; the clauses' texts joined are the answer's."""
        self._clauses.append(_Clause(text, num_samples))

    def sent(self, num_samples: int, starts_at: float) -> None:
        """More of its sound was sent, which can begin to play at `starts_at`."""
        self.num_samples += num_samples
        self._dry_at = max(starts_at, self._dry_at) + num_samples / VOICE_RATE

    def report(self, played_ms: int, now: float) -> None:
        """The client's figure: it never goes back, and never beyond what was sent."""
        played = min(played_ms * VOICE_RATE // 1000, self.num_samples)
        self._reported = max(self._reported or 0, played)
        self._reported_at = now

    def flush(self, now: float) -> None:
        """The client was told to stop: from now on only its reports can say more."""
        if self._flushed_at is None:
            self._flushed_at = now

    def played(self, now: float) -> int:
        """Samples played until `now`, or until the flush."""
        is_told_after_flush = self._flushed_at is not None and self._reported_at >= self._flushed_at
        if self._reported is not None and is_told_after_flush:
            return self._reported  # the client has stopped and said where
        now = now if self._flushed_at is None else self._flushed_at
        if self._reported is not None and now - self._reported_at < REPORT_LIFE_S:
            return min(self.num_samples, self._reported + round((now - self._reported_at) * VOICE_RATE))
        ahead = min(self.num_samples, round(max(0.0, self._dry_at - now) * VOICE_RATE))
        return max(self._reported or 0, self.num_samples - ahead)

    def ahead_s(self, now: float) -> float:
        """Seconds of sound that were sent and not played yet."""
        return (self.num_samples - self.played(now)) / VOICE_RATE

    def heard_chars(self, now: float) -> int:
        """Characters of the answer that were heard, rounded down to a word."""
        left, num_chars = self.played(now), 0
        for clause in self._clauses:
            if left + _TOLERANCE_SAMPLES < clause.num_samples:
                return num_chars + whole_words(clause.text, left / clause.num_samples)
            left = max(0, left - clause.num_samples)
            num_chars += len(clause.text)
        return num_chars


def whole_words(text: str, fraction: float) -> int:
    """Length of the whole words within the first `fraction` of the text."""
    end = int(fraction * len(text))
    if end >= len(text):
        return len(text)
    while end > 0 and not (text[end].isspace() and not text[end - 1].isspace()):
        end -= 1
    return end
