"""Bytes from a socket -> samples of the server's rate, in a stream."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import soxr

from engine.types import SAMPLE_RATE, Pcm

MIN_RATE = 8_000
MAX_RATE = 48_000

_PCM = np.dtype("<i2")
_MAX_BLOCK = 48_000
"""Samples handed to soxr at once: its buffers grow with the largest call and are kept as long as it is."""


RawPcm = Pcm | npt.NDArray[np.int16]
"""Mono at 16 kHz: float32 in [-1, 1], or s16le as a client sent it."""


def to_float(audio: RawPcm) -> Pcm:
    if audio.dtype == np.float32:
        return audio  # pyright: ignore[reportReturnType]
    samples = audio.astype(np.float32)
    samples /= 32_768.0
    return samples


def limited(audio: Pcm) -> Pcm:
    """In [-1, 1], with 0 for what is no number; the same array where that is so already."""
    if not len(audio) or (audio.min() >= -1.0 and audio.max() <= 1.0):  # false where NaN is among them
        return audio
    return np.clip(np.nan_to_num(audio), -1.0, 1.0)


class PcmDecoder:
    """PCM s16le mono at `sample_rate` in messages of any size -> float32 mono at 16 kHz.

    How the bytes were cut into messages does not change the samples; an odd byte waits for its other half.
    State is bounded: one byte and soxr's filter history (a few ms, also its delay). No bytes make it raise.
    One per session and direction; not for use from several threads at once.
    """

    def __init__(self, sample_rate: int) -> None:
        """Raises ValueError outside 8000 to 48000 samples a second."""
        if not MIN_RATE <= sample_rate <= MAX_RATE:
            raise ValueError(f"sample rate {sample_rate} Hz is not between {MIN_RATE} and {MAX_RATE}")
        self.sample_rate = sample_rate
        self._odd = b""
        self._stream = self._new_stream()

    def push(self, data: bytes | bytearray | memoryview) -> Pcm:
        """The samples that are certain with `data`; may be none."""
        return to_float(self.push_raw(data))

    def push_raw(self, data: bytes | bytearray | memoryview) -> RawPcm:
        """The same, but as they were sent where nothing is to be resampled.

        Most audio waits for its tick in pieces of 20 ms: so it takes half the room, and `to_float` is called
        once for all of it.
        """
        if self._odd or len(data) & 1:
            whole = self._odd + bytes(data)
            even = len(whole) & ~1
            data, self._odd = whole[:even], whole[even:]
        raw = np.frombuffer(data, dtype=_PCM)
        if self._stream is None:
            return raw
        samples = to_float(raw)
        if not len(samples):
            return samples
        blocks = range(0, len(samples), _MAX_BLOCK)
        return np.concatenate([self._stream.resample_chunk(samples[i : i + _MAX_BLOCK]) for i in blocks])

    def flush(self) -> Pcm:
        """The samples still inside the filter, at the end of a stream; a lone odd byte is dropped.

        The decoder is then as new.
        """
        self._odd = b""
        if self._stream is None:
            return np.zeros(0, dtype=np.float32)
        tail = self._stream.resample_chunk(np.zeros(0, dtype=np.float32), last=True)
        self._stream = self._new_stream()
        return tail

    def _new_stream(self) -> soxr.ResampleStream | None:
        if self.sample_rate == SAMPLE_RATE:
            return None
        return soxr.ResampleStream(self.sample_rate, SAMPLE_RATE, 1, dtype="float32", quality="HQ")
