"""MiniCPM-o 4.5's log-mel, second by second: its published streaming processor, without its memory of 30 s.

`StreamingMelProcessorExact` (openbmb/MiniCPM-o-4_5, processing_minicpmo.py) keeps up to 30 s of audio and
computes all of its spectrogram anew for each second. Its values follow from the newest second, a little
context, and one number of each earlier second, its loudest frame. That is what is kept here.

- A unit is 100 frames of 10 ms, with 2 frames of margin on either side that only the encoder's convolutions
  see. The right margin needs 30 ms of audio behind the unit, so the first unit waits for 1,030 ms.
- While a stream has less than 5 s, values are cut at 1e-10 only; after that, as Whisper's, at 8 below the
  maximum (log10) of the window. The window slides: when it holds 30 s, its first 10 s go.
- The last frame of the window is mirrored audio; it is part of the maximum, and never of a unit.

Importing this module imports torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from engine.models.mel_spectra import HOP, N_FFT, MelSpectra, batches
from engine.types import SAMPLE_RATE, Pcm

NUM_BINS = 80
MARGIN = 2  # frames
UNIT = 100  # frames
NUM_FRAMES = UNIT + 2 * MARGIN  # of an item
FIRST_SAMPLES = SAMPLE_RATE + 3 * HOP  # that the first unit takes; each later one takes a second
CONTEXT = N_FFT // 2 + MARGIN * HOP + 3 * HOP  # samples before its new ones that a unit sees
_SPAN = CONTEXT + SAMPLE_RATE  # samples of a unit
_MIRRORED = HOP * NUM_FRAMES + N_FFT - _SPAN  # samples behind them that the window's last frame sees
_FIXED_FLOOR_UNITS = 4  # shorter streams than 5 s
_SLIDE_AT, _SLIDE_BY = 29, 10  # seconds: the unit at which the window first holds 30 s


@dataclass(slots=True)
class MelStream:
    """One session's stream between two units; 4 kB."""

    context: Pcm = field(default_factory=lambda: np.zeros(0, np.float32))  # CONTEXT samples; none at first
    num_units: int = 0
    peaks: deque[float] = field(default_factory=lambda: deque(maxlen=_SLIDE_AT + 1))  # of each unit's frames

    def window_units(self) -> int:
        """Earlier units that the window still holds when the next unit comes."""
        slides = max(0, (self.num_units - (_SLIDE_AT - _SLIDE_BY)) // _SLIDE_BY)
        return self.num_units - _SLIDE_BY * slides

    def forget_old(self) -> None:
        """Unit numbers do not grow for ever: all that counts is where the window slides next."""
        if self.num_units >= _SLIDE_AT + _SLIDE_BY:
            self.num_units -= _SLIDE_BY


class StreamingLogMel:
    """Batched over units of many streams. For one thread."""

    def __init__(self, device: str = "cpu") -> None:
        self._spectra = MelSpectra(NUM_BINS, device)

    @torch.no_grad()
    def __call__(self, units: Sequence[tuple[MelStream, Pcm]]) -> list[tuple[torch.Tensor, bool]]:
        """For each unit its frames, float32 [NUM_BINS, NUM_FRAMES] on the CPU, and whether a stream begins.

        A stream's first unit is FIRST_SAMPLES long and its left margin is zero; each later one is a second.
        A stream's units come in their order. Streams go on with each unit; where this raises, they are of no
        more use, so work on copies.
        """
        return [made for some in batches(units) for made in self._compute(some)]

    def _compute(self, units: Sequence[tuple[MelStream, Pcm]]) -> list[tuple[torch.Tensor, bool]]:
        spans = self._spectra.room([NUM_FRAMES + 1] * len(units))
        are_first = [self._fill(span, *unit) for span, unit in zip(spans, units, strict=True)]
        mels = self._spectra.compute()
        streams = [stream for stream, _ in units]
        return [
            (self._finished(mel, stream, is_first), is_first)
            for mel, stream, is_first in zip(mels, streams, are_first, strict=True)
        ]

    def _fill(self, span: Pcm, stream: MelStream, samples: Pcm) -> bool:
        """Write the unit, with what the outer frames see; gives whether it begins its stream."""
        start = _SPAN - len(samples)
        is_first = not len(stream.context)
        if is_first:
            edge = N_FFT // 2
            span[: start - edge] = 0.0
            span[start - edge : start] = samples[edge:0:-1]
        else:
            span[:start] = stream.context
        span[start:_SPAN] = samples
        span[_SPAN:] = span[_SPAN - 2 : _SPAN - 2 - _MIRRORED : -1]
        stream.context = span[_SPAN - CONTEXT : _SPAN].copy()
        return is_first

    def _finished(self, mel: torch.Tensor, stream: MelStream, is_first: bool) -> torch.Tensor:
        floor = self._floor(stream, mel.amax(dim=0).numpy(), is_first)
        frames = mel[:, :NUM_FRAMES].clamp(min=floor).add_(4.0).mul_(0.25)
        if is_first:
            frames[:, :MARGIN] = 0.0
        return frames

    def _floor(self, stream: MelStream, peaks: npt.NDArray[np.float32], is_first: bool) -> float:
        """The least value of this unit; notes the loudest frame among those that no later unit computes."""
        own = peaks[MARGIN:] if is_first else peaks
        earlier = list(stream.peaks)[-stream.window_units() :] if stream.window_units() else []
        peak = max([float(own.max()), *earlier])
        is_short = stream.num_units < _FIXED_FLOOR_UNITS
        stream.peaks.append(float((peaks[MARGIN:UNIT] if is_first else peaks[:UNIT]).max()))
        stream.num_units += 1
        stream.forget_old()
        return -10.0 if is_short else peak - 8.0
