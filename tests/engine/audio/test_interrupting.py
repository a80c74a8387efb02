"""What interrupts an answer: the real detector on recordings, on single words, and on noises."""

from __future__ import annotations

import numpy as np
import pytest
import soxr

from engine.audio.endpoint import Edge, Endpointer, EndpointerConfig
from engine.audio.speech import WINDOW_SAMPLES, SpeechDetector, VadState
from engine.types import SAMPLE_RATE, Pcm
from engine.voice.hibari import HibariVoice
from engine.voice.voice import VOICE_RATE
from tests.support.speech import TRANSCRIPTS, recording

CONFIG = EndpointerConfig()
SILENCE = np.zeros(SAMPLE_RATE, np.float32)


@pytest.fixture(scope="module")
def voice() -> HibariVoice:
    return HibariVoice()


def interrupts(detector: SpeechDetector, audio: Pcm, config: EndpointerConfig = CONFIG) -> float | None:
    """Seconds from the first window of speech until it counts; None: it never does."""
    noise = np.random.default_rng(0).normal(0, 0.0008, len(audio) + 2 * SAMPLE_RATE).astype(np.float32)
    heard = np.concatenate([SILENCE, audio.astype(np.float32), SILENCE]) + noise
    (probabilities,) = detector.detect([(VadState(), heard)])
    endpointer = Endpointer(config)
    for i, probability in enumerate(probabilities):
        if any(e.edge is Edge.STARTED for e in endpointer.push([probability], is_interrupting=True)):
            first = int(np.argmax(probabilities >= config.threshold))
            return (i + 1 - first) * WINDOW_SAMPLES / SAMPLE_RATE
    return None


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_people_interrupt_in_a_third_of_a_second(detector: SpeechDetector, name: str):
    samples, rate = recording(name)
    audio = soxr.resample(samples.astype(np.float32) / 32768, rate, SAMPLE_RATE)
    assert interrupts(detector, audio) == pytest.approx(0.32, abs=0.1)


@pytest.mark.parametrize("word", ["Stop.", "No.", "Wait.", "Hey!", "Yes.", "Hello?", "Okay."])
def test_a_single_word_interrupts(detector: SpeechDetector, voice: HibariVoice, word: str):
    audio = soxr.resample(voice.speak(word).astype(np.float32) / 32768, VOICE_RATE, SAMPLE_RATE)
    assert interrupts(detector, audio) is not None
    assert interrupts(detector, audio, EndpointerConfig(interrupt_ms=1000)) is None  # so it can be tuned


def band(rng: np.random.Generator, seconds: float, low: float, high: float) -> np.ndarray:
    size = round(seconds * SAMPLE_RATE)
    spectrum, at = np.fft.rfft(rng.standard_normal(size)), np.fft.rfftfreq(size, 1 / SAMPLE_RATE)
    spectrum[(at < low) | (at > high)] = 0
    wave = np.fft.irfft(spectrum, size)
    return wave / np.abs(wave).max()


def test_noises_do_not_interrupt(detector: SpeechDetector):
    rng = np.random.default_rng(1)
    time_s = np.arange(SAMPLE_RATE // 2) / SAMPLE_RATE
    click = 0.5 * band(rng, 0.012, 100, 7900)
    noises = {
        "cough": 0.7 * band(rng, 0.25, 250, 3000) * np.exp(-np.linspace(0, 6, SAMPLE_RATE // 4)),
        "burst": 0.4 * band(rng, 0.3, 50, 7900) * np.hanning(round(0.3 * SAMPLE_RATE)),
        "typing": np.concatenate(
            [np.concatenate([click, np.zeros(1500 + 700 * (i % 3))]) for i in range(12)]
        ),
        "hum": 0.2 * sum(np.sin(2 * np.pi * 120 * h * time_s) / h for h in range(1, 12)),
    }
    found = {name: interrupts(detector, noise) for name, noise in noises.items()}
    assert found == dict.fromkeys(noises)


def test_dips_between_syllables_do_not_start_anew_and_pauses_do():
    def windows(pattern: str) -> list[float]:
        return [0.9 if sign == "#" else 0.1 for sign in pattern]

    for pattern, wanted in (
        ("#####..#####", 1),
        ("#####...#####...#####", 0),
        ("##########", 1),
        ("#########.", 0),
    ):
        endpointer = Endpointer(EndpointerConfig(interrupt_ms=320))
        assert len(endpointer.push(windows(pattern), is_interrupting=True)) == wanted, pattern
    endpointer = Endpointer(EndpointerConfig(min_speech_ms=100, interrupt_ms=320))
    assert not endpointer.push(windows("####"), is_interrupting=True)
    assert endpointer.push(windows("#"), is_interrupting=False)  # the answer's sound is over
