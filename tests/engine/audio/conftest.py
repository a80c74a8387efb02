from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import soundfile

from engine.audio.speech import SpeechDetector
from engine.models import load_vad_file

SPEECH = Path(__file__).parents[2] / "data" / "speech"


@pytest.fixture(scope="session")
def detector() -> SpeechDetector:
    cache = Path(os.environ.get("METRONOME_CACHE_DIR", "~/.cache/metronome")).expanduser()
    return SpeechDetector(load_vad_file(cache))


@pytest.fixture(scope="session")
def recordings() -> dict[str, np.ndarray]:
    files = sorted(SPEECH.glob("*.wav")) + sorted(SPEECH.glob("*.flac"))
    return {file.stem: soundfile.read(file, dtype="float32")[0] for file in files}
