"""Spoken turns through everything before the first caller: nobody pays for lazy loading, and a server that
cannot answer never says that it is ready.

One session speaks a turn as a caller would, in real time. On a GPU kernels are compiled and chosen by a
batch's shape when it first occurs: there many sessions speak at once, too.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soundfile

from engine.conductor import Conductor
from engine.config import SessionConfig
from engine.engine import EngineError
from engine.events import Error, ResponseDone, Tick
from engine.outputs import Close, ToClient
from engine.session import Session
from engine.types import SAMPLE_RATE, TurnMode

RECORDING = Path(__file__).parent / "audio" / "probe.flac"  # LibriVox, public domain, 16 kHz
TIME_LIMIT_S = 120.0
_PIECE_S = 0.1
_SILENCE_S = 1.5
_SHORT_ANSWER = 8  # tokens


async def rehearse(conductor: Conductor, config: SessionConfig, num_together: int = 0) -> None:
    """Speak one turn in real time and wait for its end, then `num_together` at once, as many as the engine
    holds. Raises EngineError where one is not answered."""
    samples, rate = soundfile.read(RECORDING, dtype="int16")
    assert rate == SAMPLE_RATE == config.sample_rate
    audio = samples.astype(np.int16, copy=False)
    try:
        async with asyncio.timeout(TIME_LIMIT_S):
            await _alone(conductor, config, audio)
            if num_together:
                await _together(conductor, config, audio, num_together)
    except TimeoutError:
        raise EngineError(f"the rehearsal was not answered within {TIME_LIMIT_S:g} s") from None


async def _alone(conductor: Conductor, config: SessionConfig, audio: npt.NDArray[np.int16]) -> None:
    part = _Part(conductor, "rehearsal", config)
    audio = np.concatenate([audio, np.zeros(round(_SILENCE_S * SAMPLE_RATE), np.int16)])
    step = round(_PIECE_S * SAMPLE_RATE)
    try:
        for start in range(0, len(audio), step):
            part.say(audio[start : start + step])
            await asyncio.sleep(_PIECE_S)
        if config.mode is TurnMode.MANUAL:
            part.commit()
        await part.outcome
    finally:
        part.leave()


async def _together(
    conductor: Conductor, config: SessionConfig, audio: npt.NDArray[np.int16], num_sessions: int
) -> None:
    """All end a turn at the same instant: the first is heard alone, the others in one batch, which is taken
    in while the first answers. Their audio comes faster than it was spoken, but no more than may wait."""
    if conductor.engine is None:
        raise EngineError("the rehearsal failed: the engine ended")
    limits = conductor.engine.limits
    num_sessions = min(num_sessions, limits.max_sessions, limits.num_kv_blocks // limits.blocks_per_session)
    mode = TurnMode.MANUAL if TurnMode.MANUAL in conductor.family.info.turn_modes else config.mode
    config = replace(config, mode=mode, max_tokens=_SHORT_ANSWER)
    audio = audio[: round(SAMPLE_RATE * min(max(1.0, config.budget_s), config.backlog_limit_s))]
    parts = [_Part(conductor, f"rehearsal-{i}", config) for i in range(num_sessions)]
    try:
        while not all(part.is_open for part in parts):  # noqa: ASYNC110 - bounded by the caller's timeout
            await asyncio.sleep(0.01)
        for part in parts:
            part.say(audio)
            if mode is TurnMode.MANUAL:
                part.commit()
        await asyncio.gather(*(part.outcome for part in parts))
    finally:
        for part in parts:
            part.leave()


class _Part:
    """A session, and what became of its turn."""

    def __init__(self, conductor: Conductor, name: str, config: SessionConfig) -> None:
        self.outcome: asyncio.Future[None] = conductor.loop.create_future()
        self._conductor = conductor
        self._is_continuous = config.mode is TurnMode.CONTINUOUS
        self._session = Session(name, conductor.family, config, time.monotonic())
        conductor.open(self._session, self._deliver, is_counted=False)

    @property
    def is_open(self) -> bool:
        """Its template is taken in, or it has failed."""
        return self._session.kv_tokens > 0 or self.outcome.done()

    def say(self, audio: npt.NDArray[np.int16]) -> None:
        self._conductor.carry_out(self._session, self._session.on_audio(audio.tobytes(), time.monotonic()))

    def commit(self) -> None:
        self._conductor.carry_out(self._session, self._session.on_commit(time.monotonic()))

    def leave(self) -> None:
        self._conductor.end(self._session)
        if not self.outcome.cancel() and not self.outcome.cancelled():
            self.outcome.exception()  # seen: one that failed has told of it for all

    def _deliver(self, item: ToClient) -> None:
        if self.outcome.done():
            return
        if isinstance(item, Close):
            self.outcome.set_exception(EngineError(f"the rehearsal failed: {item.error}"))
        elif isinstance(item, Error):
            self.outcome.set_exception(EngineError(f"the rehearsal failed: {item.message}"))
        elif isinstance(item, ResponseDone) or (
            isinstance(item, Tick) and item.audio_ms and self._is_continuous
        ):
            self.outcome.set_result(None)
