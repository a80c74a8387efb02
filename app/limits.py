"""How many messages a client may send: a token bucket, without a clock."""

from __future__ import annotations

from app.auth import NotAllowed

BURST_S = 5.0
"""Seconds' worth of messages that may come at once: what a network held back arrives in a burst."""


class TooFast(NotAllowed):
    code, status = "too_fast", 429


class MessageRate:
    """`per_s` messages a second on average, `BURST_S` times as many at once; None: no limit."""

    def __init__(self, per_s: float | None, now: float) -> None:
        self._per_s = per_s
        self._left = BURST_S * (per_s or 0.0)
        self._at = now

    def count(self, now: float) -> None:
        """One more message, at `now` seconds. Raises TooFast."""
        if self._per_s is None:
            return
        self._left = min(self._left + (now - self._at) * self._per_s, BURST_S * self._per_s)
        self._at = now
        if self._left < 1:
            raise TooFast(
                f"More than {self._per_s:g} messages a second: send 20 ms of audio or more in each."
            )
        self._left -= 1
