"""A client for benchmarks: speaks recordings in real time and notes when each event came."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from app.playing import REPORT_S, Player
from app.speaking import Speaker as Voice
from app.speaking import chunks


@dataclass
class Turn:
    """Times of one spoken turn, seconds after the last sample of speech was sent; None: did not come."""

    first_text_s: float | None = None
    first_sound_s: float | None = None
    clause_to_sound_s: float | None = None  # from the text of the first clause to its sound
    lateness_ms: float | None = None  # the server's own figure of the tick that answered


@dataclass
class Speaker:
    """One session in server_vad mode."""

    url: str
    rate: int
    turns: list[Turn] = field(default_factory=list)
    ticks_ms: list[float] = field(default_factory=list)
    refusal: dict[str, Any] | None = None
    is_aloud: bool = False  # ask for spoken answers, and wait until they would have been played
    player: Player = field(default_factory=Player)

    async def run(self, recordings: list[np.ndarray], pause_s: float, wait_s: float = 30.0) -> None:
        """Say each recording, wait for its answer (or give up), pause, go on."""
        voice = "&voice=on" if self.is_aloud else ""
        async with connect(f"{self.url}?sample_rate={self.rate}{voice}", proxy=None) as socket:
            self._events: asyncio.Queue[tuple[float, dict[str, Any]]] = asyncio.Queue()
            reader = asyncio.create_task(self._read(socket))
            reporter = asyncio.create_task(self._report(socket))
            try:
                for recording in recordings:
                    await self._turn(socket, recording, wait_s)
                    await self._silence(socket, pause_s)
            finally:
                reader.cancel()
                reporter.cancel()
                await asyncio.gather(reader, reporter, return_exceptions=True)

    async def _turn(self, socket, recording: np.ndarray, wait_s: float) -> None:
        await self._send(socket, recording)
        ended, turn = time.perf_counter(), Turn()
        self.turns.append(turn)
        silence = asyncio.create_task(self._silence(socket, wait_s))
        texts: list[tuple[float, int]] = []  # when so many characters had come
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    at, event = await self._events.get()
                    if event["type"] == "response.text.delta" and at > ended:
                        turn.first_text_s = turn.first_text_s or at - ended
                        texts.append((at, len(event["delta"]) + (texts[-1][1] if texts else 0)))
                    if event["type"] == "response.audio" and turn.first_sound_s is None and texts:
                        turn.first_sound_s = at - ended
                        # A clause is known to be whole when something follows it, or the text is over.
                        whole = [t for t, size in texts if size > len(event["text"])] or [texts[-1][0]]
                        turn.clause_to_sound_s = at - whole[0]
                    if event["type"] == "tick" and turn.first_text_s is not None and event["tokens"]:
                        turn.lateness_ms = event["lateness_ms"]
                    last = "response.audio.done" if self.is_aloud else "response.done"
                    if event["type"] == last and turn.first_text_s is not None:
                        await asyncio.sleep(0.05)
                        break
                while self.player.is_playing(time.monotonic()):  # noqa: ASYNC110 - it ends by the clock
                    await asyncio.sleep(0.05)
        except TimeoutError:
            pass
        finally:
            silence.cancel()
            await asyncio.gather(silence, return_exceptions=True)

    async def _silence(self, socket, seconds: float) -> None:
        await self._send(socket, np.zeros(round(seconds * self.rate), np.int16))

    async def _send(self, socket, samples: np.ndarray) -> None:
        voice = Voice(socket, self.rate, asyncio.sleep)
        for chunk in chunks(samples, self.rate):
            await voice.send(chunk)

    async def _report(self, socket) -> None:
        """What a page would have played."""
        while self.is_aloud:
            await asyncio.sleep(REPORT_S)
            if (message := self.player.report(time.monotonic())) is not None:
                await socket.send(json.dumps(message))

    async def _read(self, socket) -> None:
        try:
            async for message in socket:
                if isinstance(message, bytes):
                    continue  # sound
                event = json.loads(message)
                self.player.on_event(event, time.monotonic())
                if event["type"] == "tick" and event["audio_ms"]:
                    self.ticks_ms.append(event["lateness_ms"])
                if event["type"] == "error":
                    self.refusal = event
                self._events.put_nowait((time.perf_counter(), event))
        except ConnectionClosed:
            pass
