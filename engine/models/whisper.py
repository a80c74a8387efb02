"""Whisper through CTranslate2: a batch of recordings -> their words, and whether there were any.

Whisper was trained on 30 s windows, but its encoder runs as well on the front part of one: at 15 s it costs a
quarter and reads our recordings alike (at 10 s it began to err). So each recording gets the shortest of
`WINDOWS_S` that leaves it `TAIL_S` of silence at the end, and the recordings of one window form one call.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ctranslate2
import numpy as np
import numpy.typing as npt
from faster_whisper.feature_extractor import FeatureExtractor
from tokenizers import Tokenizer

from engine.types import SAMPLE_RATE, Pcm

WINDOWS_S = (15, 30)
TAIL_S = 1.5
MAX_AUDIO_S = WINDOWS_S[-1] - TAIL_S

HOP = 160  # samples between two frames of the spectrogram

NO_AUDIO_RMS = 1e-4  # -80 dBFS: no microphone, not even a quiet room
NO_SPEECH_PROB = 0.6  # measured: noise, hum, tones, clicks and babble over 0.65, speech under 0.4
MIN_LOGPROB = -1.6  # measured: clear speech over -1, an unusual voice down to -1.5, noise mostly under -1.6
MAX_COMPRESSION = 2.4  # as in openai/whisper's transcribe.py: text that packs better is a loop
MAX_TOKENS_PER_S = 8  # fast speech has about 5

_NOT_SAID = re.compile(r"\[[^\]]*\]|\([^)]*\)|[*♪]+")


@dataclass(frozen=True, slots=True)
class Heard:
    """What Whisper made of one recording; no words where it held none or they cannot be believed."""

    words: tuple[str, ...]
    no_speech_prob: float
    logprob: float  # mean over the tokens


NOTHING = Heard((), 1.0, 0.0)


class Whisper:
    """One model for all sessions; not for use from several threads at once."""

    def __init__(self, model_dir: Path, *, threads: int = 1, beam_size: int = 3) -> None:
        """`model_dir` is a CTranslate2 conversion of an English-only Whisper with its tokenizer.json."""
        self._model = ctranslate2.models.Whisper(
            str(model_dir), device="cpu", compute_type="int8", inter_threads=1, intra_threads=threads
        )
        self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        config = json.loads((model_dir / "config.json").read_text())
        self._suppressed = config["suppress_ids"]
        self._beam_size = beam_size
        names = ("<|startoftranscript|>", "<|notimestamps|>")
        ids = [self._tokenizer.token_to_id(name) for name in names]
        if self._model.is_multilingual or None in ids:
            raise ValueError(f"{model_dir} does not hold an English-only Whisper")
        self._prompt = ids

    def transcribe(self, batch: Sequence[Pcm]) -> list[Heard]:
        """Recordings of up to `MAX_AUDIO_S` at 16 kHz; longer ones are cut there. In order."""
        heard = [NOTHING] * len(batch)
        groups: dict[int, list[int]] = {}
        for i, audio in enumerate(batch):
            if has_sound(audio):
                groups.setdefault(window_s(len(audio)), []).append(i)
        for window, members in groups.items():
            results = self._run([batch[i] for i in members], window)
            for i, result in zip(members, results, strict=True):
                heard[i] = result
        return heard

    def _run(self, batch: list[Pcm], window: int) -> list[Heard]:
        features = np.stack([log_mel(audio, window) for audio in batch])
        encoded = self._model.encode(ctranslate2.StorageView.from_array(features))
        longest_s = max(len(audio) for audio in batch) / SAMPLE_RATE
        results = self._model.generate(
            encoded,
            [self._prompt] * len(batch),
            beam_size=self._beam_size,
            max_length=len(self._prompt) + 8 + int(longest_s * MAX_TOKENS_PER_S),
            suppress_tokens=self._suppressed,
            return_scores=True,
            return_no_speech_prob=True,
        )
        return [
            believe(self._tokenizer.decode(r.sequences_ids[0]), r.no_speech_prob, r.scores[0])
            for r in results
        ]


def has_sound(audio: Pcm) -> bool:
    return len(audio) >= HOP and float(np.sqrt(np.mean(np.square(audio)))) >= NO_AUDIO_RMS


def window_s(num_samples: int) -> int:
    """Seconds of the shortest window that holds the samples and a tail."""
    seconds = num_samples / SAMPLE_RATE + TAIL_S
    return next((w for w in WINDOWS_S if seconds <= w), WINDOWS_S[-1])


def believe(text: str, no_speech_prob: float, logprob: float) -> Heard:
    """Drop what Whisper invents: text over silence or noise, and loops."""
    words = tuple(_NOT_SAID.sub(" ", text).split())
    said = " ".join(words).encode()
    doubtful = no_speech_prob > NO_SPEECH_PROB or logprob < MIN_LOGPROB
    if doubtful or len(said) > MAX_COMPRESSION * len(zlib.compress(said)):
        words = ()
    if not any(c.isalnum() for word in words for c in word):
        words = ()
    return Heard(words, no_speech_prob, logprob)


def log_mel(audio: Pcm, window: int) -> npt.NDArray[np.float32]:
    """Whisper's log-mel spectrogram [80, window * 100] of the audio with silence after it."""
    num_samples = window * SAMPLE_RATE
    padded = np.zeros(num_samples, np.float32)
    padded[: len(audio)] = audio[:num_samples]
    return _EXTRACTOR(padded)[:, : num_samples // HOP]


_EXTRACTOR = FeatureExtractor()
