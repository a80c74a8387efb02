"""SpeechDetector with the real model: many sessions at once, as if each were alone."""

from __future__ import annotations

import numpy as np
import pytest

from engine.audio.endpoint import Edge, Endpointer
from engine.audio.speech import WINDOW_SAMPLES, SpeechDetector, VadState

RATE = 16_000
Recordings = dict[str, np.ndarray]


def padded(audio: np.ndarray) -> np.ndarray:
    """A second of silence on either side."""
    silence = np.zeros(RATE, np.float32)
    return np.concatenate([silence, audio, silence])


def sounds() -> dict[str, np.ndarray]:
    """Ten seconds each of what is not speech."""
    rng, n = np.random.default_rng(0), 10 * RATE
    t = np.arange(n) / RATE
    made = {
        "silence": np.zeros(n),
        "faint noise": rng.standard_normal(n) * 0.001,
        "noise": rng.standard_normal(n) * 0.01,
        "loud noise": rng.standard_normal(n) * 0.1,
        "clicks": np.where(np.arange(n) % 4_000 < 20, 0.5, 0.0),
        "mains hum": 0.1 * np.sin(2 * np.pi * 50 * t),
        "tone": 0.2 * np.sin(2 * np.pi * 440 * t),
        "full scale square": np.sign(np.sin(2 * np.pi * 100 * t)),
    }
    return {name: audio.astype(np.float32) for name, audio in made.items()}


def test_a_batch_of_sessions_equals_each_alone(detector: SpeechDetector, recordings: Recordings) -> None:
    audios = list(recordings.values())
    alone = [detector.detect([(VadState(), audio)])[0] for audio in audios]
    together = detector.detect([(VadState(), audio) for audio in audios])
    for a, b in zip(alone, together, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)  # other batch sizes may sum in another order


def test_cutting_the_audio_changes_nothing(detector: SpeechDetector, recordings: Recordings) -> None:
    """Frames of 20 ms of two sessions, interleaved, one starting later than the other."""
    names = ["austen-0880", "austen-0890"]
    whole = [detector.detect([(VadState(), recordings[name])])[0] for name in names]
    states = [VadState(), VadState()]
    parts: list[list[np.ndarray]] = [[], []]
    for i in range(0, 6 * RATE, 320):
        frames = [recordings[names[0]][i : i + 320], recordings[names[1]][max(i - 1_600, 0) :][:320]]
        due = [0] if i < 1_600 else [0, 1]
        for k, p in zip(due, detector.detect([(states[k], frames[k]) for k in due]), strict=True):
            parts[k].append(p)
    for k in (0, 1):
        np.testing.assert_allclose(np.concatenate(parts[k]), whole[k], atol=1e-5)
        assert len(states[k].rest) < WINDOW_SAMPLES


def test_nothing_to_hear(detector: SpeechDetector) -> None:
    assert detector.detect([]) == []
    state = VadState()
    assert len(detector.detect([(state, np.zeros(0, np.float32))])[0]) == 0
    assert len(detector.detect([(state, np.zeros(511, np.float32))])[0]) == 0
    assert len(detector.detect([(state, np.zeros(1, np.float32))])[0]) == 1


def test_bad_samples_do_not_stay_in_the_state(detector: SpeechDetector, recordings: Recordings) -> None:
    state = VadState()
    bad = np.full(WINDOW_SAMPLES, np.nan, np.float32)
    bad[::2] = np.inf
    [[p]] = detector.detect([(state, bad)])
    assert 0.0 <= p <= 1.0
    assert detector.detect([(state, recordings["austen-0880"])])[0].max() > 0.9


@pytest.mark.parametrize(
    ("name", "num_turns", "last_stop_s"),
    [("jfk", 3, 11.0), ("austen-0870", 1, 7.1), ("austen-0880", 1, 2.99), ("austen-0890", 1, 5.3)],
)
def test_turns_of_the_recordings(
    detector: SpeechDetector, recordings: Recordings, name: str, num_turns: int, last_stop_s: float
) -> None:
    """Kennedy pauses for most of a second twice, longer than a turn's end; the reader does not."""
    [probabilities] = detector.detect([(VadState(), padded(recordings[name]))])
    endpoints = Endpointer().push(probabilities)
    assert [e.edge for e in endpoints] == [Edge.STARTED, Edge.STOPPED] * num_turns
    seconds = [e.position / RATE - 1 for e in endpoints]
    assert -0.3 < seconds[0] < 0.1
    assert last_stop_s < seconds[-1] < last_stop_s + 0.7


@pytest.mark.parametrize("name", sounds())
def test_what_is_not_speech_starts_nothing(detector: SpeechDetector, name: str) -> None:
    [probabilities] = detector.detect([(VadState(), sounds()[name])])
    assert Endpointer().push(probabilities) == []
