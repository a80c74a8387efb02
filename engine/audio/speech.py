"""Where speech begins and ends: a shared detector of speech in windows, and arithmetic over what it says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime

from engine.types import SAMPLE_RATE, Pcm

WINDOW_SAMPLES = 512
"""The detector hears in windows of 32 ms."""

_CONTEXT_SAMPLES = 64  # silero-vad is given the end of the window before, too
_STATE_SHAPE = (2, 128)


@dataclass(slots=True)
class VadState:
    """One session's memory in the shared detector; bounded (under 6 kB), touched by `detect` only."""

    recurrent: npt.NDArray[np.float32] = field(default_factory=lambda: np.zeros(_STATE_SHAPE, np.float32))
    context: Pcm = field(default_factory=lambda: np.zeros(_CONTEXT_SAMPLES, np.float32))
    rest: Pcm = field(default_factory=lambda: np.zeros(0, np.float32))  # less than a window, waits for more


class SpeechDetector:
    """silero-vad (MIT, github.com/snakers4/silero-vad): one model, run on all sessions at once."""

    def __init__(self, model_file: Path, *, threads: int = 1) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(
            str(model_file), options, providers=["CPUExecutionProvider"]
        )

    def detect(self, items: Sequence[tuple[VadState, Pcm]]) -> list[npt.NDArray[np.float32]]:
        """The probability of speech in each window that the new audio completes, per item, in order.

        Audio may have any length; what does not fill a window stays in the state. A state may occur once.
        """
        pending = [np.concatenate([state.rest, audio]) for state, audio in items]
        counts = [len(audio) // WINDOW_SAMPLES for audio in pending]
        found = [np.zeros(n, np.float32) for n in counts]
        for step in range(max(counts, default=0)):
            active = [i for i, n in enumerate(counts) if n > step]
            start = step * WINDOW_SAMPLES
            windows = [pending[i][start : start + WINDOW_SAMPLES] for i in active]
            for i, p in zip(active, self._run([items[i][0] for i in active], windows), strict=True):
                found[i][step] = p
        for (state, _), audio, n in zip(items, pending, counts, strict=True):
            state.rest = audio[n * WINDOW_SAMPLES :].copy()
        return found

    def _run(self, states: list[VadState], windows: list[Pcm]) -> npt.NDArray[np.float32]:
        rows = np.stack(
            [np.concatenate([s.context, w]) for s, w in zip(states, windows, strict=True)], dtype=np.float32
        )
        rows = np.nan_to_num(rows, nan=0.0, posinf=1.0, neginf=-1.0)  # a NaN would stay in the state for ever
        recurrent = np.stack([s.recurrent for s in states], axis=1)
        inputs = {"input": rows, "state": recurrent, "sr": np.array(SAMPLE_RATE, np.int64)}
        probabilities, after = self._session.run(["output", "stateN"], inputs)
        probabilities, after = np.asarray(probabilities), np.asarray(after)
        for i, state in enumerate(states):
            state.recurrent = after[:, i].copy()
            state.context = rows[i, -_CONTEXT_SAMPLES:].copy()
        return probabilities[:, 0]
