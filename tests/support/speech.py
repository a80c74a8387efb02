"""Recordings, their words, a synthetic speaker, and how many words were misheard."""

from __future__ import annotations

import asyncio
import io
import re
import shutil
import subprocess
from pathlib import Path

import jiwer
import numpy as np
import pytest
import soundfile

from app.speaking import Speaker, chunks
from tests.support.serving import Client

DIRECTORY = Path(__file__).parents[1] / "data" / "speech"
TRANSCRIPTS = {
    "jfk.flac": "and so my fellow americans ask not what your country can do for you "
    "ask what you can do for your country",
    "austen-0870.wav": "and mister john dashwood had then leisure to consider how much there might be "
    "prudently in his power to do for them",
    "austen-0880.wav": "he was not an ill disposed young man",
    "austen-0890.wav": "unless to be rather cold hearted and rather selfish is to be ill disposed",
}


def recording(name: str) -> tuple[np.ndarray, int]:
    """int16 mono samples and their rate."""
    samples, rate = soundfile.read(DIRECTORY / name, dtype="int16", always_2d=True)
    return samples[:, 0], rate


def spoken(text: str) -> tuple[np.ndarray, int]:
    """The text in espeak-ng's voice; int16 mono samples and their rate."""
    if shutil.which("espeak-ng") is None:
        pytest.skip("espeak-ng is not installed: apt-get install espeak-ng")
    command = ["espeak-ng", "-v", "en-us", "-s", "140", "--stdout", text]
    wave = subprocess.run(command, check=True, capture_output=True).stdout
    samples, rate = soundfile.read(io.BytesIO(wave), dtype="int16")
    return np.concatenate([np.zeros(round(0.3 * rate), np.int16), samples]), rate


async def speak(client: Client, samples: np.ndarray, rate: int, silence_s: float = 1.2) -> None:
    """Send it as a microphone would: 20 ms at a time, in real time, with silence after it."""
    samples = np.concatenate([samples, np.zeros(round(silence_s * rate), np.int16)])
    speaker = Speaker(client.socket, rate, asyncio.sleep)
    for chunk in chunks(samples, rate):
        await speaker.send(chunk)


def words(text: str) -> str:
    """Lower case without punctuation, as the transcripts are written."""
    text = text.lower().replace("mr.", "mister").replace("-", " ")
    return " ".join(re.sub(r"[^a-z0-9' ]", " ", text).split())


def word_error_rate(expected: list[str], heard: list[str]) -> float:
    return jiwer.wer([words(e) for e in expected], [words(h) for h in heard])
