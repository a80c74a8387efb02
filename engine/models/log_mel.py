"""Log-mel spectrograms as Whisper's feature extractor makes them, for many chunks of PCM at once.

The values equal those of transformers' `WhisperFeatureExtractor` on each chunk alone: 25 ms Hann windows
every 10 ms over audio that is mirrored before its start; Slaney's mel filters; log10, cut at 8 below the
chunk's maximum, then (x + 4) / 4. What lies behind a chunk's end differs from model to model: `Ending`.

Importing this module imports torch: `engine.vllm.environment.prepare_process` comes before.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch

from engine.models.mel_spectra import HOP, N_FFT, MelSpectra, batches
from engine.types import Pcm

_RANGE = 8.0  # of log10, below the maximum
_EDGE = N_FFT // 2  # samples that a frame reaches beyond its middle


class Ending(enum.Enum):
    """What the frames at a chunk's end see behind it."""

    SILENCE = enum.auto()  # padding="max_length": zeros; a frame begun is a frame
    MIRROR = enum.auto()  # padding=True on a chunk alone: mirrored audio; whole frames only


class LogMel:
    """Batched over chunks of any lengths. For one thread."""

    def __init__(self, num_bins: int = 128, ending: Ending = Ending.SILENCE, device: str = "cpu") -> None:
        self._ending = ending
        self._spectra = MelSpectra(num_bins, device)

    @torch.no_grad()
    def __call__(self, chunks: Sequence[Pcm]) -> list[torch.Tensor]:
        """One float32 tensor [num_bins, num_frames(chunk)] a chunk, on the CPU, where vLLM takes it from.

        Chunks are longer than 200 samples where they end in a mirror, not empty elsewhere.
        """
        return [mel for some in batches(chunks) for mel in self._compute(some)]

    def num_frames(self, num_samples: int) -> int:
        """Frames of a chunk."""
        return num_samples // HOP if self._ending is Ending.MIRROR else -(-num_samples // HOP)

    def _compute(self, chunks: Sequence[Pcm]) -> list[torch.Tensor]:
        spans = self._spectra.room([self._num_seen(len(chunk)) for chunk in chunks])
        for span, chunk in zip(spans, chunks, strict=True):
            self._fill(span, chunk)
        mels = self._spectra.compute()
        return [self._finished(mel, len(chunk)) for mel, chunk in zip(mels, chunks, strict=True)]

    def _num_seen(self, num_samples: int) -> int:
        """Frames that count for a chunk's maximum: behind it those that still reach back into it."""
        return num_samples // HOP if self._ending is Ending.MIRROR else (num_samples + _EDGE) // HOP + 1

    def _fill(self, span: Pcm, chunk: Pcm) -> None:
        """Write the chunk, with what its frames see beyond it."""
        mirrored = chunk[_EDGE:0:-1]
        span[: _EDGE - len(mirrored)] = 0.0
        span[_EDGE - len(mirrored) : _EDGE] = mirrored
        body, behind = span[_EDGE : _EDGE + len(chunk)], span[_EDGE + len(chunk) :]
        body[:] = chunk[: len(body)]
        behind[:] = chunk[-2 : -2 - len(behind) : -1] if self._ending is Ending.MIRROR else 0.0

    def _finished(self, mel: torch.Tensor, num_samples: int) -> torch.Tensor:
        lowest = float(mel.amax()) - _RANGE
        return mel[:, : self.num_frames(num_samples)].clamp(min=lowest).add_(4.0).mul_(0.25)
