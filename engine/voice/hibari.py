"""The default voice: hibari-tts, American English, inside its package; about 130 times real time on a core.

Only the voice that ships with the package is used: the others would be fetched from the network.
"""

from __future__ import annotations

import re
import unicodedata

import numpy as np
from hibari import SAMPLE_RATE, Hibari
from hibari.voices import DEFAULT, VOICES, voice_path

from engine.voice.voice import VOICE_RATE, Sound16, Voice

_SYMBOLS = re.compile(r"[*_`#|~^<>{}\[\]\\]+|https?://\S+")  # markup, which nobody wants to hear
_QUIET = 0.01  # of full scale; under it is silence
_LEAD_S = 0.04
_TAIL_S = 0.12  # after a clause; longer where a sentence ends
_SENTENCE_TAIL_S = 0.3
_SENTENCE_END = (".", "!", "?", "…", '."', '!"', '?"')


class HibariVoice(Voice):
    name = f"hibari-{DEFAULT}"

    def __init__(self) -> None:
        if SAMPLE_RATE != VOICE_RATE or not VOICES[DEFAULT].get("bundled"):
            raise ValueError("this hibari-tts has another rate, or its default voice is not in the package")
        self._model = Hibari(model=voice_path(DEFAULT, download_missing=False), threads=1)

    def warm_up(self) -> None:
        for text in ("Hello.", "This voice is as warm now as it will be for the first caller, 1 or 2."):
            self.speak(text)

    def speak(self, text: str) -> Sound16:
        plain = _plain(text)
        if not any(char.isalnum() for char in plain):
            return np.zeros(0, np.int16)
        wave = self._model(plain, seed=0)  # the same text sounds the same
        tail_s = _SENTENCE_TAIL_S if plain.endswith(_SENTENCE_END) else _TAIL_S
        return np.rint(np.clip(_trimmed(wave, tail_s), -1.0, 1.0) * 32767).astype(np.int16)


def _plain(text: str) -> str:
    """Without markup, and with every digit one of 0 to 9: the voice fails on others (a superscript, say)."""
    text = " ".join(_SYMBOLS.sub(" ", text).split())
    if text.isascii():
        return text
    text = unicodedata.normalize("NFKC", text)
    return "".join(str(unicodedata.digit(char)) if char.isdigit() else char for char in text)


def _trimmed(wave: np.ndarray, tail_s: float) -> np.ndarray:
    """Without the 0.3 s of silence at either end: what is spoken in clauses would drag."""
    loud = np.nonzero(np.abs(wave) > _QUIET)[0]
    if not len(loud):
        return wave[:0]
    start = max(0, loud[0] - round(_LEAD_S * VOICE_RATE))
    return wave[start : loud[-1] + round(tail_s * VOICE_RATE)]
