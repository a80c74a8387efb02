"""Warnings to a client: what they say, and how often."""

from __future__ import annotations

import math

from engine.events import Warning

EVERY_S = 5.0  # at most one of a kind in this time: a warning for each frame would be a flood of its own


class Notices:
    """Times are seconds of the caller's clock."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def input_rate(self, measured: float, declared: int, now: float) -> list[Warning]:
        return self._warn(
            "input_rate",
            f"Audio arrives at {measured:.0f} samples a second, but {declared} were declared: set "
            "sample_rate in the URL to the real rate, or send in real time.",
            now,
        )

    def audio_dropped(self, dropped_ms: int, limit_s: float, now: float) -> list[Warning]:
        return self._warn(
            "audio_dropped",
            f"More than {limit_s:g} s of audio waited: the oldest was dropped, {dropped_ms} ms so far. "
            "Send in real time; if you do, the server is overloaded.",
            now,
        )

    def session_expiring(self, tokens_left: int, now: float) -> list[Warning]:
        return self._warn(
            "session_expiring",
            f"{tokens_left} tokens are left before this session reaches its length and is closed: open a new "
            "one soon.",
            now,
        )

    def _warn(self, code: str, message: str, now: float) -> list[Warning]:
        if now - self._last.get(code, -math.inf) < EVERY_S:
            return []
        self._last[code] = now
        return [Warning(code=code, message=message)]
