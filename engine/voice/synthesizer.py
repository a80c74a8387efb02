"""Turns clauses into sound on a thread of its own, whoever's playback runs dry first before the others."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from engine.types import Utterance
from engine.voice.voice import Voice

log = logging.getLogger(__name__)

OnDuration = Callable[[float, float], None]
"""Takes seconds: that the voice took for a clause, and from the clause's text to its sound."""

OnSpoken = Callable[[Utterance, bytes | None], None]
"""Takes PCM s16le at `VOICE_RATE`, or None where the voice failed. Called on the event loop."""


class _Waiting(NamedTuple):
    needed_at: float
    order: int  # before it others would be compared
    utterance: Utterance
    since: float


class Synthesizer:
    """Bounded by construction: a session has at most one clause here (voice/mouth.py), waiting or running.

    All methods belong to the event loop's thread.
    """

    def __init__(self, voice: Voice, on_spoken: OnSpoken, on_duration: OnDuration) -> None:
        self.voice = voice
        self.num_failures = 0
        self._on_spoken = on_spoken
        self._on_duration = on_duration
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(1, "voice")
        self._waiting: list[_Waiting] = []  # a heap, by when the sound is needed
        self._wanted: dict[str, Utterance] = {}  # session -> its clause that waits; others are stale
        self._order = itertools.count()
        self._is_running = False

    @property
    def num_waiting(self) -> int:
        return len(self._wanted)

    async def warm_up(self) -> None:
        await self._loop.run_in_executor(self._pool, self.voice.warm_up)

    def say(self, utterance: Utterance) -> None:
        self._wanted[utterance.session_id] = utterance
        heapq.heappush(
            self._waiting, _Waiting(utterance.needed_at, next(self._order), utterance, time.perf_counter())
        )
        self._go_on()

    def hush(self, session_id: str) -> None:
        """Forget what waits for this session; what runs already is the session's to ignore."""
        if self._wanted.pop(session_id, None) is not None:
            self._waiting = [item for item in self._waiting if item.utterance.session_id != session_id]
            heapq.heapify(self._waiting)

    def close(self) -> None:
        self._waiting.clear()
        self._wanted.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _go_on(self) -> None:
        if self._is_running or not self._waiting:
            return
        first = heapq.heappop(self._waiting)
        utterance = first.utterance
        self._wanted.pop(utterance.session_id, None)
        self._is_running = True
        future = self._loop.run_in_executor(self._pool, self._speak, utterance)
        future.add_done_callback(lambda f: f.cancelled() or self._on_done(first, *f.result()))

    def _speak(self, utterance: Utterance) -> tuple[bytes | None, float]:
        begin = time.perf_counter()
        try:
            sound = self.voice.speak(utterance.text).astype("<i2").tobytes()
        except Exception as error:
            # A voice meets any text a model can write: what it cannot say costs that answer its sound. The
            # error's own text may hold words, which are not for the log.
            kind, size = type(error).__name__, len(utterance.text)
            log.error("session %s: a clause of %d characters: %s", utterance.session_id, size, kind)
            return None, time.perf_counter() - begin
        return sound, time.perf_counter() - begin

    def _on_done(self, done: _Waiting, pcm: bytes | None, duration_s: float) -> None:
        self._is_running = False
        self._on_duration(duration_s, time.perf_counter() - done.since)
        self.num_failures += pcm is None
        self._on_spoken(done.utterance, pcm)
        self._go_on()
