"""The power that mel filters see in many spans of audio at once, on the CPU or on a GPU.

Importing this module imports torch: `engine.vllm.environment.prepare_process` comes before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from engine.types import SAMPLE_RATE, Pcm

HOP = 160  # samples between two frames
N_FFT = 400  # samples of a frame
MAX_SPANS = 32  # computed at once: what a burst would need is not kept for ever
_FLOOR = 1e-10  # of the power, before the logarithm
_CPU_BANDS = 8  # the filters are narrow: a band of them needs a few of the frequencies only
_CPU_FRAMES = 800  # computed at once, or somewhat more or less: they stay in a core's cache

T = TypeVar("T")


class MelSpectra:
    """log10 of the power that mel filters see, of many spans of audio at once: `room`, fill it, `compute`.

    Spans lie one behind the other, so none is padded to another's length. All buffers are kept for the next
    batch: fresh ones would be fresh pages each time. On CUDA it has a stream of its own, and a batch is one
    copy to the device, some 10 launches and one copy back, both by way of pinned memory.
    """

    def __init__(self, num_bins: int, device: str) -> None:
        self._device = torch.device(device)
        self._is_cuda = self._device.type == "cuda"
        self._num_bins = num_bins
        self._window = torch.hann_window(N_FFT, dtype=torch.float32, device=self._device)
        self._bands = [
            (rows, needed, torch.from_numpy(filters).float().to(self._device))
            for rows, needed, filters in _banded(mel_filters(num_bins), 1 if self._is_cuda else _CPU_BANDS)
        ]
        # cuFFT makes a plan for each number of frames it meets, and keeps it on the device.
        self._frames_unit = 256 if self._is_cuda else 1
        self._stream = None
        if self._is_cuda:
            self._stream = torch.cuda.Stream(self._device)
            self._stream.wait_stream(torch.cuda.current_stream(self._device))  # it makes window and filters
        self._buffers: dict[str, torch.Tensor] = {}
        self._places: list[tuple[int, int]] = []  # of each span: its first frame among all, its frames

    def room(self, num_frames: Sequence[int]) -> list[Pcm]:
        """A span of (num_frames - 1) * HOP + N_FFT samples each, to be written; what was there is not."""
        starts = [0]
        for num in num_frames:
            starts.append(starts[-1] + num + 2)  # two more frames reach from one span into the next
        self._places = list(zip(starts, num_frames, strict=False))
        audio = self._host("audio", (self._num_samples(starts[-1]),)).numpy()
        return [audio[at * HOP : (at + num - 1) * HOP + N_FFT] for at, num in self._places]

    def compute(self) -> list[torch.Tensor]:
        """[num_bins, num_frames] of each span, on the CPU; good until the next `room`."""
        at, num = self._places[-1]
        num_frames = self._whole(at + num)
        audio = self._host("audio", (self._num_samples(at + num),))
        if self._stream is None:
            mel = self._buffer("mel", (self._num_bins, num_frames))
            num_parts = max(1, round(num_frames / _CPU_FRAMES))
            step = -(-num_frames // num_parts)
            for first in range(0, num_frames, step):
                some = mel[:, first : first + step]
                self._compute(audio[first * HOP : (first + some.shape[1] - 1) * HOP + N_FFT], some)
        else:
            with torch.cuda.stream(self._stream):
                made = self._buffer("mel on device", (self._num_bins, num_frames))
                self._compute(audio.to(self._device, non_blocking=True), made)
                mel = self._host("mel", (self._num_bins, num_frames)).copy_(made, non_blocking=True)
            self._stream.synchronize()
        return [mel[:, at : at + num] for at, num in self._places]

    def _compute(self, audio: torch.Tensor, mel: torch.Tensor) -> None:
        """`mel` [num_bins, frames] of the audio's frames."""
        frames = audio.unfold(0, N_FFT, HOP)
        frames = torch.mul(frames, self._window, out=self._buffer("frames", frames.shape))
        parts = torch.view_as_real(torch.fft.rfft(frames)).square_()
        power = torch.add(parts[..., 0], parts[..., 1], out=self._buffer("power", parts.shape[:2]))
        for rows, needed, filters in self._bands:
            torch.mm(filters, power.T[needed], out=mel[rows])
        mel.clamp_(min=_FLOOR).log10_()

    def _whole(self, num_frames: int) -> int:
        """As many as are computed: those behind the last span see what was there."""
        return -(-num_frames // self._frames_unit) * self._frames_unit

    def _num_samples(self, num_frames: int) -> int:
        return (self._whole(num_frames) - 1) * HOP + N_FFT

    def _host(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        return self._buffer(name, shape, is_pinned=self._is_cuda)

    def _buffer(self, name: str, shape: Sequence[int], *, is_pinned: bool | None = None) -> torch.Tensor:
        """Of this shape, with whatever is in it; on the device, or in (pinned) memory of the host."""
        num = math.prod(shape)
        kept = self._buffers.get(name)
        if kept is None or len(kept) < num:
            # By its name: what it is by default vLLM changes in all threads while it loads a model.
            if is_pinned is None:
                kept = torch.zeros(num, dtype=torch.float32, device=self._device)
            else:
                kept = torch.zeros(num, dtype=torch.float32, pin_memory=is_pinned)
            self._buffers[name] = kept
        return kept[:num].view(shape)


def batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Of at most `MAX_SPANS`."""
    return (items[start : start + MAX_SPANS] for start in range(0, len(items), MAX_SPANS))


def _banded(
    filters: npt.NDArray[np.float64], num_bands: int
) -> list[tuple[slice, slice, npt.NDArray[np.float64]]]:
    """The filters of a band, the frequencies that they need, and their weights [filters, frequencies]."""
    bands, first = [], 0
    for band in np.array_split(filters, num_bands):
        (used,) = np.nonzero(band.any(axis=0))
        needed = slice(int(used[0]), int(used[-1]) + 1)
        bands.append((slice(first, first + len(band)), needed, np.ascontiguousarray(band[:, needed])))
        first += len(band)
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
