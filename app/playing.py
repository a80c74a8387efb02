"""A spoken answer at the client: how much would have been played by now, and telling it. Plays nothing.

What a page does with its loudspeaker, our command-line clients do with this, so that the server is told what
was heard and clients take turns as people do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from typing import Any

from websockets.asyncio.client import ClientConnection

REPORT_S = 0.25


class Player:
    """One answer after the other, each played as soon as it can. Times are seconds of one clock. No I/O."""

    def __init__(self) -> None:
        self.response_id: str | None = None
        self._sent_s = 0.0
        self._ends_at = 0.0  # when all that came has been played
        self._reported_ms = -1
        self.flushed = asyncio.Event()  # a report is due now; cleared by who makes it

    def on_event(self, event: dict[str, Any], now: float) -> None:
        match event.get("type"):
            case "response.audio":
                if event.get("response_id") != self.response_id:
                    self.response_id, self._sent_s, self._reported_ms = event.get("response_id"), 0.0, -1
                duration_s = float(event.get("duration_ms") or 0.0) / 1000
                self._sent_s += duration_s
                self._ends_at = max(self._ends_at, now) + duration_s
            case "response.flush" if event.get("response_id") == self.response_id:
                self._sent_s = self._played_s(now)
                self._ends_at = now
                self._reported_ms = -1  # told once more: exactly
                self.flushed.set()

    def is_playing(self, now: float) -> bool:
        return self._ends_at > now

    def report(self, now: float) -> dict[str, Any] | None:
        """The message that is due each `REPORT_S` and after a flush; None where nothing is new."""
        played_ms = round(1000 * self._played_s(now))
        if self.response_id is None or played_ms == self._reported_ms:
            return None
        self._reported_ms = played_ms
        return {"type": "response.played", "response_id": self.response_id, "played_ms": played_ms}

    def _played_s(self, now: float) -> float:
        return max(0.0, self._sent_s - max(0.0, self._ends_at - now))


async def keep_reporting(socket: ClientConnection, player: Player) -> None:
    """Tell the server what was played, as often as a page does, and right after a flush: until cancelled.

    Raises websockets.ConnectionClosed.
    """
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPORT_S):
                await player.flushed.wait()
        player.flushed.clear()
        if (message := player.report(time.monotonic())) is not None:
            await socket.send(json.dumps(message))


class FirstTimes:
    """From the end of what was said to the answer's first text and first sound."""

    def __init__(self) -> None:
        self._spoken_at: float | None = None
        self.text_ms: int | None = None
        self.sound_ms: int | None = None

    def spoken(self, now: float) -> None:
        """The last sample of a turn was sent."""
        self._spoken_at, self.text_ms, self.sound_ms = now, None, None

    def on_event(self, event: dict[str, Any], now: float) -> None:
        if self._spoken_at is None:
            return
        since_ms = round(1000 * (now - self._spoken_at))
        if event.get("type") == "response.text.delta" and self.text_ms is None:
            self.text_ms = since_ms
        elif event.get("type") == "response.audio" and self.sound_ms is None:
            self.sound_ms = since_ms

    def as_event(self) -> dict[str, Any]:
        """For the printers, among the server's events."""
        return {"type": "client.timing", "first_text_ms": self.text_ms, "first_sound_ms": self.sound_ms}
