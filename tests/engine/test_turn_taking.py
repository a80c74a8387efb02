"""What passes the speech gate: the speech, its pre-roll, and nothing twice."""

from __future__ import annotations

import numpy as np
import pytest

from engine.audio.endpoint import EndpointerConfig
from engine.audio.speech import WINDOW_SAMPLES
from engine.turn_taking import SpeechAudio, SpeechBegan, SpeechEnded, SpeechGate

CONFIG = EndpointerConfig()


def run(gate: SpeechGate, probabilities: list[float], group: int) -> list:
    items = []
    for start in range(0, len(probabilities), group):
        part = probabilities[start : start + group]
        position = start * WINDOW_SAMPLES
        audio = np.arange(position, position + len(part) * WINDOW_SAMPLES, dtype=np.float32)
        gate.append(audio, 1 << 20)
        taken = gate.take()
        assert taken is not None and len(taken) == len(audio)
        items += gate.push(taken, part)
    return items


@pytest.mark.parametrize("group", [1, 3, 40])
def test_one_turn_however_the_windows_come(group: int):
    items = run(SpeechGate(CONFIG), [0.0] * 40 + [0.9] * 50 + [0.0] * 40, group)
    began, *audio, ended = items
    assert isinstance(began, SpeechBegan) and isinstance(ended, SpeechEnded)
    passed = np.concatenate([a.audio for a in audio if isinstance(a, SpeechAudio)])
    assert (passed == np.arange(began.position, ended.position)).all()
    assert began.position == 40 * WINDOW_SAMPLES - CONFIG.pre_roll_ms * 16
    assert ended.position >= 90 * WINDOW_SAMPLES


def test_silence_passes_nothing_and_little_is_kept():
    gate = SpeechGate(CONFIG)
    assert run(gate, [0.0] * 5000, 10) == []
    assert len(gate._recent) < 16_000


def test_audio_the_detector_is_too_slow_for_is_dropped_and_counted():
    gate = SpeechGate(CONFIG)
    assert gate.append(np.zeros(5000, np.float32), 4000) == 1000
    assert gate.num_dropped_samples == 1000


def test_reset_starts_anew():
    gate = SpeechGate(CONFIG)
    run(gate, [0.9] * 20, 1)
    state = gate.vad_state
    gate.reset()
    assert gate.vad_state is not state and gate.take() is None
    assert run(gate, [0.0] * 10, 1) == []
