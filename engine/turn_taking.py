"""Which of a session's audio is speech: between the voice activity detector and the queue to be heard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.audio.endpoint import MAX_DIP, Edge, Endpointer, EndpointerConfig
from engine.audio.queue import AudioQueue
from engine.audio.resample import RawPcm
from engine.audio.speech import WINDOW_SAMPLES, VadState
from engine.types import SAMPLE_RATE, Pcm


@dataclass(frozen=True, slots=True)
class SpeechBegan:
    position: int  # samples since the session began


@dataclass(frozen=True, slots=True)
class SpeechAudio:
    audio: Pcm


@dataclass(frozen=True, slots=True)
class SpeechEnded:
    position: int


class SpeechGate:
    """Lets speech through, with what was said just before it was recognised as speech.

    Audio goes in by `append`, the detector takes it with `take`, and its verdict comes back by `push`.
    """

    def __init__(self, config: EndpointerConfig) -> None:
        self._config = config
        self._unheard = AudioQueue()
        self._kept_samples = config.max_start_ms * SAMPLE_RATE // 1000 + (2 + MAX_DIP) * WINDOW_SAMPLES
        self.reset()

    def reset(self) -> None:
        """Forget everything; the next audio is the first."""
        self.vad_state = VadState()
        self._unheard.clear()
        self._endpointer = Endpointer(self._config)
        self._recent: Pcm = np.zeros(0, np.float32)  # the end of what the detector has seen
        self._position = 0  # of the end of `_recent`
        self._passed = 0  # everything before this position was let through, or never will be

    @property
    def position(self) -> int:
        """Samples since the session began, or the gate was reset, that the detector has seen."""
        return self._position

    @property
    def num_dropped_samples(self) -> int:
        return self._unheard.num_dropped_samples

    @property
    def num_waiting_samples(self) -> int:
        return self._unheard.num_samples

    def append(self, audio: RawPcm, limit_samples: int) -> int:
        """Audio from the client; returns the samples dropped because the detector is too far behind."""
        return self._unheard.append(audio, limit_samples)

    def take(self) -> Pcm | None:
        """What the detector has not seen, when that is at least a window."""
        return self._unheard.take().audio if self._unheard.num_samples >= WINDOW_SAMPLES else None

    @property
    def is_speaking(self) -> bool:
        """The user is in the middle of a turn."""
        return self._endpointer.is_speaking

    def push(
        self, audio: Pcm, probabilities: Sequence[float], *, is_interrupting: bool = False
    ) -> list[SpeechBegan | SpeechAudio | SpeechEnded]:
        """The detector's verdict on `audio`: a probability for each window that it completed.

        `is_interrupting`: an answer is being written or played, so that only longer speech counts.
        """
        items: list[SpeechBegan | SpeechAudio | SpeechEnded] = []
        self._recent = np.concatenate([self._recent, audio])
        self._position += len(audio)
        for endpoint in self._endpointer.push(probabilities, is_interrupting):
            if endpoint.edge is Edge.STARTED:
                self._passed = max(endpoint.position, self._position - len(self._recent))
                items.append(SpeechBegan(endpoint.position))
            else:
                items += self._pass_until(endpoint.position)
                items.append(SpeechEnded(endpoint.position))
        if self._endpointer.is_speaking:
            items += self._pass_until(self._position)
        self._recent = self._recent[-self._kept_samples :]
        return items

    def _pass_until(self, position: int) -> list[SpeechAudio]:
        start = self._position - len(self._recent)
        audio = self._recent[self._passed - start : position - start]
        self._passed = max(self._passed, position)
        return [SpeechAudio(audio)] if len(audio) else []
