"""Whisper through CTranslate2, with the real model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from engine.models.whisper import NOTHING, Whisper, believe, window_s

RATE = 16_000
Recordings = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def model(whisper_dir: Path) -> Whisper:
    return Whisper(whisper_dir)


def noises() -> dict[str, np.ndarray]:
    rng, n = np.random.default_rng(1), 3 * RATE
    made = {
        "faint noise": rng.standard_normal(n) * 0.001,
        "noise": rng.standard_normal(n) * 0.01,
        "loud noise": rng.standard_normal(n) * 0.1,
        "clicks": np.where(np.arange(n) % 4_000 < 20, 0.5, 0.0),
        "mains hum": 0.1 * np.sin(2 * np.pi * 50 * np.arange(n) / RATE),
        "tone": 0.2 * np.sin(2 * np.pi * 440 * np.arange(n) / RATE),
    }
    return {name: audio.astype(np.float32) for name, audio in made.items()}


def test_a_batch_equals_each_alone(model: Whisper, recordings: Recordings) -> None:
    """Also across windows: the long recording must not change what the short ones become."""
    audios = [*recordings.values(), np.concatenate([recordings["jfk"], recordings["austen-0870"]])]
    assert {window_s(len(audio)) for audio in audios} == {15, 30}
    alone = [model.transcribe([audio])[0] for audio in audios]
    together = model.transcribe(audios)
    assert [h.words for h in together] == [h.words for h in alone]
    for a, b in zip(alone, together, strict=True):
        assert a.words
        assert abs(a.logprob - b.logprob) < 0.05  # int8 and another batch size
        assert abs(a.no_speech_prob - b.no_speech_prob) < 0.02


def test_what_is_not_speech_has_no_words(model: Whisper) -> None:
    heard = model.transcribe(list(noises().values()))
    assert [h.words for h in heard] == [()] * len(heard)


def test_no_audio_costs_no_pass(model: Whisper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Whisper, "_run", None)
    silent = [np.zeros(n, np.float32) for n in (0, 1, 159, RATE, 40 * RATE)]
    assert model.transcribe(silent) == [NOTHING] * 5
    assert model.transcribe([]) == []


def test_short_and_overlong_audio_is_no_error(model: Whisper, recordings: Recordings) -> None:
    speech = np.concatenate([*recordings.values(), *recordings.values()])
    short, long = model.transcribe([speech[:200], speech])
    assert short.words == ()
    assert len(long.words) > 22


@pytest.mark.parametrize(
    ("text", "no_speech_prob", "logprob", "words"),
    [
        (" Hello there.", 0.1, -0.3, ("Hello", "there.")),
        (" Hello there.", 0.9, -0.3, ()),
        (" Hello there.", 0.1, -2.0, ()),
        (" [BLANK_AUDIO]", 0.1, -0.3, ()),
        (" (music) Yes. ♪ *", 0.1, -0.3, ("Yes.",)),
        (" ... -", 0.1, -0.3, ()),
        (" you know" * 40, 0.1, -0.3, ()),
        ("", 0.1, -0.3, ()),
    ],
)
def test_believe(text: str, no_speech_prob: float, logprob: float, words: tuple[str, ...]) -> None:
    assert believe(text, no_speech_prob, logprob).words == words


def test_refuses_another_model(whisper_dir: Path, tmp_path: Path) -> None:
    for file in whisper_dir.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {}, "merges": []}}')
    with pytest.raises(ValueError, match="English-only Whisper"):
        Whisper(tmp_path)
