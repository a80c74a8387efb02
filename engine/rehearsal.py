"""One spoken turn through everything before the first caller: nobody pays for lazy loading, and a server that
cannot answer never says that it is ready.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import soundfile

from engine.conductor import Conductor
from engine.config import SessionConfig
from engine.engine import EngineError
from engine.events import ResponseDone, Tick
from engine.outputs import Close, ToClient
from engine.session import Session
from engine.types import SAMPLE_RATE, TurnMode

RECORDING = Path(__file__).parent / "audio" / "probe.flac"  # LibriVox, public domain, 16 kHz
TIME_LIMIT_S = 120.0
_PIECE_S = 0.1
_SILENCE_S = 1.5


async def rehearse(conductor: Conductor, config: SessionConfig) -> None:
    """Speak one turn in real time and wait for its end. Raises EngineError when there is none."""
    session = Session("rehearsal", conductor.family, config, time.monotonic())
    outcome: asyncio.Future[None] = conductor.loop.create_future()

    def deliver(item: ToClient) -> None:
        if outcome.done():
            return
        if isinstance(item, Close):
            outcome.set_exception(EngineError(f"the rehearsal failed: {item.error}"))
        elif isinstance(item, ResponseDone) or (
            isinstance(item, Tick) and item.audio_ms and config.mode is TurnMode.CONTINUOUS
        ):
            outcome.set_result(None)

    conductor.open(session, deliver)
    try:
        async with asyncio.timeout(TIME_LIMIT_S):
            await _speak(conductor, session, config)
            await outcome
    except TimeoutError:
        raise EngineError(f"the rehearsal was not answered within {TIME_LIMIT_S:g} s") from None
    finally:
        conductor.end(session)


async def _speak(conductor: Conductor, session: Session, config: SessionConfig) -> None:
    audio, rate = soundfile.read(RECORDING, dtype="int16")
    assert rate == SAMPLE_RATE == config.sample_rate
    audio = np.concatenate([audio, np.zeros(round(_SILENCE_S * rate), np.int16)])
    step = round(_PIECE_S * rate)
    for start in range(0, len(audio), step):
        now = time.monotonic()
        conductor.carry_out(session, session.on_audio(audio[start : start + step].tobytes(), now))
        await asyncio.sleep(_PIECE_S)
    if config.mode is TurnMode.MANUAL:
        conductor.carry_out(session, session.on_commit(time.monotonic()))
