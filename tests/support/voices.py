"""Voices for tests: nothing to load, sound whose length is known."""

from __future__ import annotations

import numpy as np

from engine.voice.voice import VOICE_RATE, Sound16, Voice

CHAR_SAMPLES = VOICE_RATE * 60 // 1000  # of a spoken character: 60 ms, as people talk


class ToneVoice(Voice):
    """A tone of 60 ms a character, spaces included."""

    name = "tone"

    def speak(self, text: str) -> Sound16:
        return (8000 * np.sin(0.1 * np.arange(len(text) * CHAR_SAMPLES))).astype(np.int16)
