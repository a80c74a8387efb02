"""What sessions count over their lives; only ever grows, so that sums of it can be exported as counters."""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass(slots=True)
class Tally:
    audio_samples: int = 0  # taken from clients, resampled
    dropped_samples: int = 0  # of these, given up because too much waited
    rate_mismatches: int = 0  # windows of audio that contradicted the declared rate
    tokens: int = 0  # decoded
    sound_samples: int = 0  # of spoken answers, at the voice's rate
    interruptions: int = 0  # answers stopped while they were written or played
    faults: int = 0  # exceptions of our own code, works the engine refused; each ends its session

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))
