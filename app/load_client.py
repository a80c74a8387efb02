"""One caller of `metronome load`: speaks recordings in real time, notes what comes back and when.

Lateness as the client sees it runs from when an answer was due to its first text: from `speech.stopped`
(server_vad) or from its own commit (manual). In continuous mode, where no answer is ever due, it is how much
longer than the budget the next tick took to come. The server's own figure excludes the way over the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket as sockets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from app.load_figures import Figures
from app.load_plan import Caller, LoadOptions, Manner, session_length_s
from app.playing import REPORT_S, Player, keep_reporting
from app.speaking import Speaker
from app.talk import Turns

SLOW_READ_S = 2.0  # a slow reader takes one message in so long
SLOW_BUFFER_BYTES = 4096
LAST_WORDS_S = 5.0
CLOSE_S = 3.0  # a slow reader's handshake would end no sooner
_BLOCKED_MS = 1.0  # shorter sends did not wait


@dataclass(frozen=True, slots=True)
class Speech:
    """The recordings as chunks, at the session's rate."""

    rate: int
    recordings: Sequence[Sequence[bytes]]


class Listener:
    """What one session's events say, for the figures. No I/O; times are seconds of one clock."""

    def __init__(self, figures: Figures, turn: str, began_at: float) -> None:
        self.turns = Turns()
        self.player = Player()
        self.is_accepted = False
        self.retry_s: float | None = None  # set by a refusal
        self._figures = figures
        self._turn = turn
        self._began_at = began_at
        self._budget_ms = 0.0
        self._tick_at: float | None = None
        self._due_at: float | None = None  # an answer's first text is owed since then
        self._spoken_at: float | None = None  # the recording's end, until the answer's first text
        self._unheard_at: float | None = None  # the same, until its first sound

    def spoken(self, now: float) -> None:
        """The last sample of a recording was sent."""
        self._figures.turns += 1
        self._spoken_at = self._unheard_at = now
        if self._turn == "manual":
            self._due_at = now

    def on_event(self, event: dict[str, Any], now: float) -> None:
        figures = self._figures
        match event.get("type"):
            case "session.created":
                self.is_accepted = True
                self._budget_ms = float(event.get("budget_ms") or 0.0)
                figures.accepted += 1
                figures.connect.add(1000 * (now - self._began_at))
            case "tick":
                self._on_tick(event, now)
            case "speech.stopped" if self._turn == "server_vad":
                self._due_at = now
            case "response.text.delta":
                self._on_text(now)
            case "response.audio" if self._unheard_at is not None:
                figures.first_sound.add(1000 * (now - self._unheard_at))
                self._unheard_at = None
            case "response.done":
                figures.answers[str(event.get("reason"))] += 1
            case "warning":
                figures.warnings[str(event.get("code"))] += 1
            case "error":
                self._on_error(event)
        self.player.on_event(event, now)
        self.turns.on_event(event)

    def is_answered(self, num_before: int, now: float) -> bool:
        """What was said since then has been answered, and the answer's sound played."""
        return self.turns.is_answered(num_before) and not self.player.is_playing(now)

    def _on_tick(self, event: dict[str, Any], now: float) -> None:
        late_ms = float(event.get("lateness_ms") or 0.0)
        self._figures.server_lateness.add(late_ms)
        self._figures.ticks_over_budget += late_ms > self._budget_ms
        if self._turn == "continuous" and self._tick_at is not None:
            self._figures.client_lateness.add(max(0.0, 1000 * (now - self._tick_at) - self._budget_ms))
        self._tick_at = now

    def _on_text(self, now: float) -> None:
        if self._due_at is not None:
            self._figures.client_lateness.add(1000 * (now - self._due_at))
        if self._spoken_at is not None:
            self._figures.first_text.add(1000 * (now - self._spoken_at))
        self._due_at = self._spoken_at = None

    def _on_error(self, event: dict[str, Any]) -> None:
        code = str(event.get("code"))
        if self.is_accepted:
            self._figures.errors[code] += 1
            return
        self._figures.refused[code] += 1
        self.retry_s = (event.get("retry_after_ms") or 1000) / 1000


class Call:
    """All sessions of one caller, one after the other."""

    def __init__(self, options: LoadOptions, caller: Caller, speech: Speech, figures: Figures) -> None:
        self._options = options
        self._caller = caller
        self._speech = speech
        self._figures = figures
        self._rng = random.Random(caller.seed)

    async def run(self, begin: float, stop_at: float) -> None:
        """From the arrival on, until it has had its session; with `repeat`, until `stop_at` (monotonic)."""
        await asyncio.sleep(max(0.0, begin + self._caller.arrives_s - time.monotonic()))
        while time.monotonic() < stop_at:
            retry_s = await self._session(stop_at)
            if not self._options.repeat:
                return
            await asyncio.sleep(min(max(retry_s or 1.0, 0.1), max(0.0, stop_at - time.monotonic())))

    async def _session(self, stop_at: float) -> float | None:
        """One session; the seconds that a refusal asked to wait."""
        options, figures, now = self._options, self._figures, time.monotonic()
        length_s = session_length_s(options, self._rng)
        is_slow = self._caller.manner is Manner.READS_SLOWLY
        listener = Listener(figures, options.turn, now)
        query = {"sample_rate": self._speech.rate, "turn": options.turn}
        if options.voice:
            query["voice"] = "on"
        headers = {"Authorization": f"Bearer {options.key}"} if options.key else None
        figures.attempts += 1
        figures.active += 1
        try:
            async with connect(
                f"{options.url}{'&' if '?' in options.url else '?'}{urlencode(query)}",
                additional_headers=headers,
                compression=None,
                proxy=None,  # it would be measured too
                max_queue=1 if is_slow else 64,
                max_size=1 << 24,
                close_timeout=CLOSE_S,
            ) as socket:
                if is_slow:
                    raw = socket.transport.get_extra_info("socket")
                    raw.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, SLOW_BUFFER_BYTES)
                await self._talk(socket, listener, min(stop_at, now + length_s))
        except (OSError, WebSocketException) as error:
            status = f" {error.response.status_code}" if isinstance(error, InvalidStatus) else ""
            figures.failed[type(error).__name__ + status] += 1
        finally:
            figures.active -= 1
        return listener.retry_s

    async def _talk(self, socket: ClientConnection, listener: Listener, end_at: float) -> None:
        reader = asyncio.create_task(self._read(socket, listener))
        speaker = asyncio.create_task(self._speak(socket, listener))
        tasks = [reader, speaker]
        if self._options.voice:
            tasks.append(asyncio.create_task(keep_reporting(socket, listener.player)))
        vanishes = self._caller.manner is Manner.VANISHES
        if vanishes:
            end_at = time.monotonic() + self._rng.random() * min(end_at - time.monotonic(), 60.0)
        try:
            left_s = max(0.0, end_at - time.monotonic())
            await asyncio.wait({reader, speaker}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if reader.done() or speaker.done():
                if speaker.done() and not isinstance(speaker.exception(), ConnectionClosed):
                    speaker.result()  # a bug of ours: let it be seen
                with contextlib.suppress(ConnectionClosed, TimeoutError):
                    async with asyncio.timeout(LAST_WORDS_S):
                        await reader  # the reason, which may be unread yet
                self._figures.closed_by_server[str(socket.close_code)] += 1
            elif vanishes:
                self._figures.ended_by_client["vanished"] += 1
                socket.transport.abort()
            else:
                self._figures.ended_by_client["left"] += 1
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, socket: ClientConnection, listener: Listener) -> None:
        while True:
            message = await socket.recv()
            if isinstance(message, str):
                listener.on_event(json.loads(message), time.monotonic())
                message = message.encode()
            self._figures.bytes_in += len(message)
            if self._caller.manner is Manner.READS_SLOWLY:
                await asyncio.sleep(SLOW_READ_S)

    async def _speak(self, socket: ClientConnection, listener: Listener) -> None:
        """Turn after turn, until cancelled or the server closes."""
        options, speech = self._options, self._speech
        speaker = Speaker(socket, speech.rate, asyncio.sleep)
        await self._silence(speaker, self._rng.uniform(0.0, options.pause_s))  # a phase of its own
        turn = self._rng.randrange(len(speech.recordings))
        while True:
            num_answers = listener.turns.num_answers
            for chunk in speech.recordings[turn % len(speech.recordings)]:
                await self._send(speaker, chunk)
            listener.spoken(time.monotonic())
            if options.turn == "manual":
                await socket.send('{"type": "input.commit"}')
            if options.turn != "continuous":
                await self._await_answer(speaker, listener, num_answers)
            await self._silence(speaker, self._rng.uniform(0.5, 1.5) * options.pause_s)
            turn += 1

    async def _await_answer(self, speaker: Speaker, listener: Listener, num_before: int) -> None:
        """Silence goes on meanwhile, as from a microphone; in manual mode it would join the next turn."""
        try:
            async with asyncio.timeout(self._options.wait_s):
                while not listener.is_answered(num_before, time.monotonic()):
                    if self._options.turn == "manual":
                        listener.turns.changed.clear()
                        with contextlib.suppress(TimeoutError):
                            await asyncio.wait_for(listener.turns.changed.wait(), REPORT_S)
                    else:
                        await self._send(speaker, speaker.silence)
        except TimeoutError:
            self._figures.unanswered += 1

    async def _silence(self, speaker: Speaker, seconds: float) -> None:
        if self._options.turn == "manual":
            await asyncio.sleep(seconds)
            speaker.restart()
            return
        end_at = time.monotonic() + seconds
        while time.monotonic() < end_at:
            await self._send(speaker, speaker.silence)

    async def _send(self, speaker: Speaker, chunk: bytes) -> None:
        await speaker.send(chunk)
        figures = self._figures
        figures.bytes_out += len(chunk)
        figures.slip.add(1000 * speaker.slip_s)
        if (blocked_ms := 1000 * speaker.blocked_s) > _BLOCKED_MS:
            figures.blocked.add(blocked_ms)
