"""Audio that waits to be heard, kept in turns, with a bound."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from engine.audio.resample import RawPcm, to_float
from engine.types import Pcm

MAX_TURNS = 64  # that have ended and wait; a client can end turns faster than they are answered
_NOTHING: Pcm = np.zeros(0, np.float32)


@dataclass(slots=True)
class _Turn:
    parts: deque[RawPcm] = field(default_factory=deque)
    num_samples: int = 0
    ended_at: float | None = None  # when its end became known; None while it is open


@dataclass(frozen=True, slots=True)
class Taken:
    audio: Pcm
    ended_at: float | None  # set: the turn ends with this audio, and did so at this time


class AudioQueue:
    """Bounded: beyond the limit the oldest samples are dropped and counted. The ends of turns never are, but
    where more than `MAX_TURNS` wait, the oldest two become one."""

    def __init__(self) -> None:
        self._turns: deque[_Turn] = deque([_Turn()])
        self.num_samples = 0
        self.num_dropped_samples = 0

    def append(self, audio: RawPcm, limit_samples: int) -> int:
        """Add to the open turn; return how many samples had to go to keep within the limit."""
        turn = self._turns[-1]
        if len(audio):
            turn.parts.append(audio)
        turn.num_samples += len(audio)
        self.num_samples += len(audio)
        excess = max(0, self.num_samples - limit_samples)
        if excess:
            self._drop(excess)
        return excess

    def end_turn(self, now: float) -> None:
        self._turns[-1].ended_at = now
        self._turns.append(_Turn())
        if len(self._turns) > MAX_TURNS + 1:
            oldest = self._turns.popleft()
            self._turns[0].parts.extendleft(reversed(oldest.parts))
            self._turns[0].num_samples += oldest.num_samples

    def clear(self) -> None:
        self._turns = deque([_Turn()])
        self.num_samples = 0

    @property
    def has_ended_turn(self) -> bool:
        return self._turns[0].ended_at is not None

    @property
    def num_ended_turns(self) -> int:
        return len(self._turns) - 1

    @property
    def has_audio(self) -> bool:
        return self._turns[0].num_samples > 0

    def take(self) -> Taken:
        """All that waits of the oldest turn."""
        turn = self._turns[0]
        audio: Pcm = _NOTHING
        if turn.parts:
            # Raw and float samples together would be noise: numpy may not convert the ones to the others.
            audio = to_float(np.concatenate(turn.parts, casting="no", dtype=turn.parts[0].dtype))  # pyright: ignore[reportArgumentType]
        self.num_samples -= turn.num_samples
        if turn.ended_at is None:
            self._turns[0] = _Turn()
        else:
            self._turns.popleft()
        return Taken(audio, turn.ended_at)

    def _drop(self, num_samples: int) -> None:
        self.num_samples -= num_samples
        self.num_dropped_samples += num_samples
        for turn in self._turns:
            while turn.parts and num_samples:
                part = turn.parts.popleft()
                cut = min(num_samples, len(part))
                if cut < len(part):
                    turn.parts.appendleft(part[cut:])
                turn.num_samples -= cut
                num_samples -= cut
