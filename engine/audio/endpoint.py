"""From probabilities of speech to turns. Arithmetic only: no audio, no clock; positions are in samples."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from engine.audio.speech import WINDOW_SAMPLES
from engine.types import SAMPLE_RATE

MAX_DIP = 2
"""Windows without speech inside what may interrupt: a plosive's silence is shorter, a pause longer."""


@dataclass(frozen=True, slots=True)
class EndpointerConfig:
    """When speech counts as begun and as ended. Durations are rounded up to windows of 32 ms."""

    threshold: float = 0.5  # a window at or over it is speech
    release: float = 0.35  # once speaking, only a window under it is silence (hysteresis)
    min_speech_ms: int = 128  # shorter sounds (clicks, coughs) start nothing
    interrupt_ms: int = 320  # while an answer is written or played: shorter speech does not interrupt it
    pre_roll_ms: int = 300  # audio from before the first window of speech that belongs to the turn
    stop_silence_ms: int = 550  # so much silence ends the turn

    def __post_init__(self) -> None:
        if not 0.0 < self.release <= self.threshold <= 1.0:
            raise ValueError(f"not 0 < release {self.release} <= threshold {self.threshold} <= 1")
        if min(self.min_speech_ms, self.interrupt_ms, self.stop_silence_ms) <= 0 or self.pre_roll_ms < 0:
            raise ValueError("durations of speech and silence must be over 0, pre_roll_ms at least 0")

    @property
    def max_start_ms(self) -> int:
        """The longest time from a turn's first sample to when its start is known, less rounding."""
        return self.pre_roll_ms + max(self.min_speech_ms, self.interrupt_ms)


class Edge(enum.StrEnum):
    STARTED = "started"  # position: where the turn's audio begins, pre-roll included
    STOPPED = "stopped"  # position: the end of the turn's audio


@dataclass(frozen=True, slots=True)
class Endpoint:
    edge: Edge
    position: int  # samples since the stream began


class Endpointer:
    """One session's turns. Edges alternate: STARTED, STOPPED; positions never go back.

    A start is known only when so much was spoken: keep `max_start_ms` of audio. State is a few numbers.
    """

    def __init__(self, config: EndpointerConfig = EndpointerConfig()) -> None:
        self._config = config
        self._min_speech = _windows(config.min_speech_ms)
        self._interrupt = max(self._min_speech, _windows(config.interrupt_ms))
        self._stop_silence = _windows(config.stop_silence_ms)
        self._pre_roll = config.pre_roll_ms * SAMPLE_RATE // 1000
        self._window = 0  # windows seen
        self._run = 0  # windows in a row of speech (while silent) or of silence (while speaking)
        self._dip = 0  # windows in a row of no speech, within what may become an interruption
        self._edge = 0  # position of the last edge
        self.is_speaking = False

    def push(self, probabilities: Iterable[float], is_interrupting: bool = False) -> list[Endpoint]:
        """What the next windows show; usually nothing. `is_interrupting`: an answer is written or played."""
        found: list[Endpoint] = []
        for probability in probabilities:
            self._window += 1
            if self.is_speaking:
                endpoint = self._speaking(float(probability))
            else:
                endpoint = self._silent(float(probability), is_interrupting)
            if endpoint is not None:
                self._edge = endpoint.position
                found.append(endpoint)
        return found

    def _silent(self, probability: float, is_interrupting: bool) -> Endpoint | None:
        """Speech in a row begins a turn. Where it must last longer, dips between syllables are allowed."""
        if probability >= self._config.threshold:
            self._run += self._dip + 1
            self._dip = 0
        elif is_interrupting and self._run and self._dip < MAX_DIP:
            self._dip += 1
        else:
            self._run = self._dip = 0
        if self._dip or self._run < (self._interrupt if is_interrupting else self._min_speech):
            return None
        first = (self._window - self._run) * WINDOW_SAMPLES
        self.is_speaking, self._run = True, 0
        return Endpoint(Edge.STARTED, max(first - self._pre_roll, self._edge))

    def _speaking(self, probability: float) -> Endpoint | None:
        self._run = self._run + 1 if probability < self._config.release else 0
        if self._run < self._stop_silence:
            return None
        self.is_speaking, self._run = False, 0
        return Endpoint(Edge.STOPPED, self._window * WINDOW_SAMPLES)


def _windows(duration_ms: int) -> int:
    return -(-duration_ms * SAMPLE_RATE // (1000 * WINDOW_SAMPLES))
