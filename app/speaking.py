"""What every client of ours shares: recordings as 20 ms chunks, sent on an absolute schedule."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

CHUNK_MS = 20
MIN_RATE, MAX_RATE = 8_000, 48_000  # what the server accepts

Samples = npt.NDArray[np.int16]
Sleep = Callable[[float], Awaitable[None]]


class ClientError(Exception):
    """Ends the command with a sentence for the person at the terminal."""


class Sends(Protocol):
    async def send(self, message: bytes) -> None: ...


def read_recording(path: Path) -> tuple[Samples, int]:
    """Mono samples at the file's own rate, or at the nearest one the server takes."""
    import soundfile

    try:
        audio, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except (OSError, soundfile.SoundFileError) as error:
        raise ClientError(f"cannot read {path}: {error}") from None
    if len(audio) == 0:
        raise ClientError(f"cannot read {path}: it holds no audio")
    mono = audio.mean(axis=1)
    if not MIN_RATE <= rate <= MAX_RATE:
        import soxr

        wanted = min(max(rate, MIN_RATE), MAX_RATE)
        mono, rate = soxr.resample(mono, rate, wanted), wanted
    return np.clip(np.rint(mono * 32767), -32768, 32767).astype(np.int16), rate


def at_one_rate(recordings: Sequence[tuple[Samples, int]]) -> tuple[list[Samples], int]:
    """A session has one rate, the first recording's: the others are resampled to it."""
    import soxr

    rate = recordings[0][1]
    return [s if own == rate else soxr.resample(s, own, rate) for s, own in recordings], rate


def chunk_samples(rate: int) -> int:
    """Samples of one chunk; where the rate does not divide, it is a little shorter than 20 ms."""
    return max(1, rate * CHUNK_MS // 1000)


def chunks(samples: Samples, rate: int) -> list[bytes]:
    """The last may be shorter."""
    size = chunk_samples(rate)
    return [samples[i : i + size].astype("<i2").tobytes() for i in range(0, len(samples), size)]


class Speaker:
    """Sends chunks when they are due. Due times are absolute, so that delays do not add up.

    After each `send`, `slip_s` is how late this process was to begin it, and `blocked_s` how long the socket
    took it: the first is the client's own fault, the second the server's or the network's.
    """

    def __init__(self, socket: Sends, rate: int, sleep: Sleep) -> None:
        self._socket = socket
        self._sleep = sleep
        self._due_s: float | None = None
        self._free_s = 0.0  # when the last send returned
        self._chunk_s = chunk_samples(rate) / rate
        self.silence = bytes(2 * chunk_samples(rate))
        self.slip_s = self.blocked_s = 0.0

    async def send(self, chunk: bytes) -> None:
        now_s = time.monotonic()
        self._due_s = now_s if self._due_s is None else self._due_s + self._chunk_s
        await self._sleep(max(0.0, self._due_s - now_s))
        begin_s = time.monotonic()
        await self._socket.send(chunk)
        self.slip_s = max(0.0, begin_s - max(self._due_s, self._free_s))
        self._free_s = time.monotonic()
        self.blocked_s = self._free_s - begin_s

    def restart(self) -> None:
        """After a pause: the next chunk is due at once."""
        self._due_s = None
