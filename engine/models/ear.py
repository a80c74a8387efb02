"""One session's hearing in a cascade: its turn's audio, cut into segments a recogniser can take.

A pass of the recogniser costs the same for one second as for thirteen, so while the user talks there is one
only where it may commit words: with `PARTIAL_S` of new audio (more for a long segment, whose passes cost four
times as much) that is not quiet. The end of a segment or a turn always gets its pass.
"""

from __future__ import annotations

import enum
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace

import numpy as np

from engine.audio.resample import limited
from engine.models.stable_prefix import StablePrefix
from engine.models.whisper import MAX_AUDIO_S, TAIL_S, WINDOWS_S
from engine.types import SAMPLE_RATE, Pcm

PARTIAL_S = 1.5
PARTIAL_LONG_S = 3.5
PARTIAL_RMS = 0.003  # -50 dBFS: a quiet room; the final pass hears it all the same
SHORT_SEGMENT = int((WINDOWS_S[0] - TAIL_S) * SAMPLE_RATE)
MAX_SEGMENT = int((MAX_AUDIO_S - 0.5) * SAMPLE_RATE)
CUT_WITHIN = 5 * SAMPLE_RATE  # a full segment is cut at the quietest moment of its last 5 s
_CUT_STEP = SAMPLE_RATE // 10


class Pass(enum.Enum):
    """What a pass of the recogniser is for."""

    PARTIAL = enum.auto()  # the user still talks
    SEGMENT = enum.auto()  # the segment is full; the turn goes on
    FINAL = enum.auto()  # the turn ends


@dataclass(slots=True)
class Ear:
    """Keeps at most `MAX_SEGMENT` of audio between hearings, and one turn's words, bounded by tokens."""

    audio: Pcm = field(default_factory=lambda: np.zeros(0, np.float32))  # the current segment
    num_passed: int = 0  # samples of it that the last pass had
    prefix: StablePrefix = field(default_factory=StablePrefix)  # the current segment's words
    words: list[str] = field(default_factory=list)  # the turn's words that were given to the model
    num_tokens: int = 0  # their tokens

    def take(self, audio: Pcm, is_final: bool) -> list[tuple[Pass, Pcm]]:
        """Add audio; the passes that are due now, in order: any SEGMENTs, then at most one of the others.

        A PARTIAL may be left out: it is due again next time.
        """
        self.audio = np.concatenate([self.audio, limited(audio)])
        due: list[tuple[Pass, Pcm]] = []
        while len(self.audio) > MAX_SEGMENT:
            cut = quietest(self.audio[:MAX_SEGMENT])
            due.append((Pass.SEGMENT, self.audio[:cut]))
            self.audio, self.num_passed = self.audio[cut:].copy(), 0
        if is_final:
            due.append((Pass.FINAL, self.audio))
        elif self._is_worth_a_pass():
            due.append((Pass.PARTIAL, self.audio))
        return due

    def heard(self, kind: Pass, words: tuple[str, ...]) -> list[str]:
        """A pass's words, passes in order; those to give to the model now."""
        if kind is Pass.PARTIAL:
            self.num_passed = len(self.audio)
            return self.prefix.update(words)
        rest = self.prefix.finish(words)
        self.prefix = StablePrefix()
        return rest

    def reset(self) -> None:
        """As new, for the next turn."""
        self.become(Ear())

    def copy(self) -> Ear:
        return replace(self, prefix=deepcopy(self.prefix), words=[*self.words])

    def become(self, other: Ear) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(other, each.name))

    def _is_worth_a_pass(self) -> bool:
        new = self.audio[self.num_passed :]
        wanted_s = PARTIAL_S if len(self.audio) <= SHORT_SEGMENT else PARTIAL_LONG_S
        return len(new) >= wanted_s * SAMPLE_RATE and float(np.sqrt(np.mean(np.square(new)))) >= PARTIAL_RMS


def quietest(audio: Pcm) -> int:
    """The middle of the quietest 100 ms in the last `CUT_WITHIN` samples; of several the latest."""
    tail = audio[-CUT_WITHIN:]
    steps = tail[: len(tail) // _CUT_STEP * _CUT_STEP].reshape(-1, _CUT_STEP)
    energy = np.square(steps).mean(axis=1)
    last = len(energy) - 1 - int(np.argmin(energy[::-1]))
    return len(audio) - len(tail) + last * _CUT_STEP + _CUT_STEP // 2
