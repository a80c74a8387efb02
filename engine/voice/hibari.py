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
_LONG_NUMBER = re.compile(r"\d[\d,]{29,}")  # about as long as the voice has names for: it fails beyond
_DIGITS_AT_ONCE = 10  # of such a number, which nobody could follow otherwise
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
        if not _is_latin(plain):
            raise ValueError("the voice speaks English: most of these letters it would leave out")
        wave = self._model(plain, seed=0)  # the same text sounds the same
        tail_s = _SENTENCE_TAIL_S if plain.endswith(_SENTENCE_END) else _TAIL_S
        return np.rint(np.clip(_trimmed(wave, tail_s), -1.0, 1.0) * 32767).astype(np.int16)


def _plain(text: str) -> str:
    """Without markup, every digit one of 0 to 9, long numbers in groups: on others (a superscript, say) the
    voice fails.
    """
    text = " ".join(_SYMBOLS.sub(" ", text).split())
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
        text = "".join(str(unicodedata.digit(char)) if char.isdigit() else char for char in text)
    return _LONG_NUMBER.sub(_in_groups, text)


def _in_groups(number: re.Match[str]) -> str:
    digits = number.group().replace(",", "")
    starts = range(0, len(digits), _DIGITS_AT_ONCE)
    return " ".join(digits[start : start + _DIGITS_AT_ONCE] for start in starts)


def _is_latin(text: str) -> bool:
    """At least half of the letters are; true where there are none."""
    if text.isascii():
        return True
    are_latin = [unicodedata.name(char, "").startswith("LATIN") for char in text if char.isalpha()]
    return 2 * sum(are_latin) >= len(are_latin)


def _trimmed(wave: np.ndarray, tail_s: float) -> np.ndarray:
    """Without the 0.3 s of silence at either end: what is spoken in clauses would drag."""
    loud = np.nonzero(np.abs(wave) > _QUIET)[0]
    if not len(loud):
        return wave[:0]
    start = max(0, loud[0] - round(_LEAD_S * VOICE_RATE))
    return wave[start : loud[-1] + round(tail_s * VOICE_RATE)]
