"""Log-mel spectrograms as Whisper's feature extractor makes them, for many chunks of PCM at once.

The values equal those of transformers' `WhisperFeatureExtractor` on each chunk alone: 25 ms Hann windows
every 10 ms over audio that is mirrored before its start; Slaney's mel filters; log10, cut at 8 below the
chunk's maximum, then (x + 4) / 4. What lies behind a chunk's end differs from model to model: `Ending`.

Importing this module imports torch: `engine.vllm.environment.prepare_process` comes before.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.types import SAMPLE_RATE, Pcm

HOP = 160  # samples between two frames
N_FFT = 400  # samples of a frame
_EDGE = N_FFT // 2  # samples that a frame reaches beyond its middle
_FLOOR = 1e-10  # of the power, before the logarithm
_RANGE = 8.0  # of log10, below the maximum
_NUM_BANDS = 4  # the filters are narrow: a band of them needs a few of the frequencies only
_CPU_GROUP = 4  # chunks whose frames stay in a core's cache


class Ending(enum.Enum):
    """What the frames at a chunk's end see behind it."""

    SILENCE = enum.auto()  # padding="max_length": zeros; a frame begun is a frame
    MIRROR = enum.auto()  # padding=True on a chunk alone: mirrored audio; whole frames only


class LogMel:
    """Batched over chunks of any lengths. For one thread; on CUDA it has a stream of its own."""

    def __init__(self, num_bins: int = 128, ending: Ending = Ending.SILENCE, device: str = "cpu") -> None:
        self._ending = ending
        self._device = torch.device(device)
        self._window = torch.hann_window(N_FFT, device=self._device)
        self._bands = [
            (first, last, torch.from_numpy(filters).float().to(self._device))
            for first, last, filters in _banded(mel_filters(num_bins))
        ]
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    @torch.no_grad()
    def __call__(self, chunks: Sequence[Pcm]) -> list[torch.Tensor]:
        """One float32 tensor [num_bins, num_frames(chunk)] a chunk, on the CPU, where vLLM takes it from.

        Chunks are longer than 200 samples where they end in a mirror, not empty elsewhere.
        """
        if not chunks:
            return []
        if self._stream is None:
            groups = (chunks[start : start + _CPU_GROUP] for start in range(0, len(chunks), _CPU_GROUP))
            return [mel for group in groups for mel in self._compute(group)]
        with torch.cuda.stream(self._stream):
            return self._compute(chunks)

    def num_frames(self, num_samples: int) -> int:
        """Frames of a chunk."""
        return num_samples // HOP if self._ending is Ending.MIRROR else -(-num_samples // HOP)

    def _compute(self, chunks: Sequence[Pcm]) -> list[torch.Tensor]:
        counts = [self.num_frames(len(chunk)) for chunk in chunks]
        audio = torch.from_numpy(self._extended(chunks)).to(self._device)
        frames = audio.unfold(1, N_FFT, HOP) * self._window  # [chunks, frames, N_FFT]
        spectrum = torch.fft.rfft(frames)
        power = (spectrum.real.square() + spectrum.imag.square()).transpose(1, 2)
        bands = [filters @ power[:, first:last] for first, last, filters in self._bands]
        mel = torch.cat(bands, dim=1).clamp_(min=_FLOOR).log10_()  # [chunks, bins, frames]
        peaks = mel
        if self._ending is Ending.MIRROR and min(counts) < mel.shape[2]:
            # Frames behind a shorter chunk are of nothing; behind silence they are silent, and no maximum.
            is_own = torch.arange(mel.shape[2])[None, :] < torch.tensor(counts)[:, None]
            peaks = mel.masked_fill(~is_own[:, None, :].to(self._device), np.log10(_FLOOR))
        lowest = peaks.amax(dim=(1, 2), keepdim=True) - _RANGE
        mel = torch.maximum(mel[:, :, : max(counts)], lowest).add_(4.0).div_(4.0).cpu()
        # Copies: a view would keep the whole batch's alive as long as one session waits with it.
        return [row[:, :count].clone() for row, count in zip(mel, counts, strict=True)]

    def _extended(self, chunks: Sequence[Pcm]) -> npt.NDArray[np.float32]:
        """[chunks, samples]: each with what its frames see beyond it. Behind silence, frames begin as long as
        they reach back into the chunk: they count for its maximum."""
        longest = max(len(chunk) for chunk in chunks)
        audio = np.zeros((len(chunks), longest + 4 * _EDGE), np.float32)
        for row, chunk in zip(audio, chunks, strict=True):
            num = len(chunk)
            row[_EDGE : _EDGE + num] = chunk
            row[:_EDGE] = row[2 * _EDGE : _EDGE : -1]
            if self._ending is Ending.MIRROR:
                row[_EDGE + num : 2 * _EDGE + num] = chunk[-2 : -_EDGE - 2 : -1]
        num_frames = longest // HOP if self._ending is Ending.MIRROR else (longest + _EDGE) // HOP + 1
        return audio[:, : (num_frames - 1) * HOP + N_FFT]


def _banded(filters: npt.NDArray[np.float64]) -> list[tuple[int, int, npt.NDArray[np.float64]]]:
    """First and last + 1 of the frequencies that a band of filters needs, and its [filters, frequencies]."""
    bands = []
    for band in np.array_split(filters, _NUM_BANDS):
        (needed,) = np.nonzero(band.any(axis=0))
        first, last = int(needed[0]), int(needed[-1]) + 1
        bands.append((first, last, np.ascontiguousarray(band[:, first:last])))
    return bands


def mel_filters(num_bins: int) -> npt.NDArray[np.float64]:
    """Slaney's triangular filters of equal area [num_bins, 1 + N_FFT / 2], from 0 Hz to half the rate.

    Malcolm Slaney, "Auditory Toolbox" (1998): linear below 1 kHz, logarithmic above.
    """
    step_hz, corner_hz, log_step = 200 / 3, 1000.0, np.log(6.4) / 27
    corner = corner_hz / step_hz
    top = corner + np.log(SAMPLE_RATE / 2 / corner_hz) / log_step
    mels = np.linspace(0.0, top, num_bins + 2)
    edges = np.where(mels < corner, mels * step_hz, corner_hz * np.exp(log_step * (mels - corner)))
    bins = np.linspace(0.0, SAMPLE_RATE / 2, 1 + N_FFT // 2)
    slopes = edges[:, None] - bins[None, :]
    widths = np.diff(edges)[:, None]
    triangles = np.minimum(-slopes[:-2] / widths[:-1], slopes[2:] / widths[1:])
    return np.maximum(0.0, triangles) * (2.0 / (edges[2:] - edges[:-2]))[:, None]
