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

from app.speaking import Speaker as Voice
from app.speaking import chunks


@dataclass
class Turn:
    """Times of one spoken turn, seconds after the last sample of speech was sent; None: did not come."""

    first_text_s: float | None = None
    lateness_ms: float | None = None  # the server's own figure of the tick that answered


@dataclass
class Speaker:
    """One session in server_vad mode."""

    url: str
    rate: int
    turns: list[Turn] = field(default_factory=list)
    ticks_ms: list[float] = field(default_factory=list)
    refusal: dict[str, Any] | None = None

    async def run(self, recordings: list[np.ndarray], pause_s: float, wait_s: float = 30.0) -> None:
        """Say each recording, wait for its answer (or give up), pause, go on."""
        async with connect(f"{self.url}?sample_rate={self.rate}", proxy=None) as socket:
            self._events: asyncio.Queue[tuple[float, dict[str, Any]]] = asyncio.Queue()
            reader = asyncio.create_task(self._read(socket))
            try:
                for recording in recordings:
                    await self._turn(socket, recording, wait_s)
                    await self._silence(socket, pause_s)
            finally:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)

    async def _turn(self, socket, recording: np.ndarray, wait_s: float) -> None:
        await self._send(socket, recording)
        ended, turn = time.perf_counter(), Turn()
        self.turns.append(turn)
        silence = asyncio.create_task(self._silence(socket, wait_s))
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    at, event = await self._events.get()
                    if event["type"] == "response.text.delta" and turn.first_text_s is None and at > ended:
                        turn.first_text_s = at - ended
                    if event["type"] == "tick" and turn.first_text_s is not None and event["tokens"]:
                        turn.lateness_ms = event["lateness_ms"]
                    if event["type"] == "response.done" and turn.first_text_s is not None:
                        await asyncio.sleep(0.05)
                        break
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

    async def _read(self, socket) -> None:
        try:
            async for message in socket:
                event = json.loads(message)
                if event["type"] == "tick" and event["audio_ms"]:
                    self.ticks_ms.append(event["lateness_ms"])
                if event["type"] == "error":
                    self.refusal = event
                self._events.put_nowait((time.perf_counter(), event))
        except ConnectionClosed:
            pass
