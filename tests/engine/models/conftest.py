from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import soundfile

from engine.models import bundles
from engine.models.prepare import prepare
from engine.models.smollm2_whisper import SmolLM2Whisper

SPEECH = Path(__file__).parents[2] / "data" / "speech"


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    return Path(os.environ.get("METRONOME_CACHE_DIR", "~/.cache/metronome")).expanduser()


@pytest.fixture(scope="session")
def llm_dir(cache_dir: Path) -> Path:
    return prepare(bundles.SMOLLM2, cache_dir)


@pytest.fixture(scope="session")
def whisper_dir(cache_dir: Path) -> Path:
    return prepare(bundles.WHISPER, cache_dir)


@pytest.fixture(scope="session")
def family(llm_dir: Path, whisper_dir: Path) -> SmolLM2Whisper:
    return SmolLM2Whisper(llm_dir, whisper_dir)


@pytest.fixture(scope="session")
def recordings() -> dict[str, np.ndarray]:
    files = sorted(SPEECH.glob("*.wav")) + sorted(SPEECH.glob("*.flac"))
    return {file.stem: soundfile.read(file, dtype="float32")[0] for file in files}
