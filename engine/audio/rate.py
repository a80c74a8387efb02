"""Does the audio's rate contradict what the client declared? A wrong one spoils every word, silently."""

from __future__ import annotations

WINDOW_S = 3.0
MAX_GAP_S = 0.25  # a longer pause between messages means that the client mutes or pauses: no verdict
TOLERANCE = 0.15


class RateMeter:
    """Compares bytes a second with the declared rate, over windows in which audio came without a pause."""

    def __init__(self, sample_rate: int) -> None:
        self._bytes_per_s = 2 * sample_rate
        self._window_start: float | None = None
        self._last = 0.0
        self._num_bytes = 0
        self.num_mismatches = 0

    def push(self, num_bytes: int, now: float) -> float | None:
        """Return the measured samples a second when a whole window contradicts the declared rate."""
        if self._window_start is None or now - self._last > MAX_GAP_S:
            self._window_start, self._last, self._num_bytes = now, now, 0
            return None  # this message's audio was spoken before the window began
        self._last = now
        self._num_bytes += num_bytes
        elapsed = now - self._window_start
        if elapsed < WINDOW_S:
            return None
        rate = self._num_bytes / elapsed
        self._window_start, self._num_bytes = now, 0
        if abs(rate / self._bytes_per_s - 1) <= TOLERANCE:
            return None
        self.num_mismatches += 1
        return rate / 2
