"""From a socket's bytes to transcripts: resampling, speech detection, turns and hearing together."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import soxr

from engine.audio.endpoint import Edge, Endpointer
from engine.audio.resample import PcmDecoder
from engine.audio.speech import SpeechDetector, VadState
from engine.models import load_vad_file
from engine.models.smollm2_whisper import SmolLM2Whisper
from engine.types import Hearing

RATE = 16_000


@pytest.mark.parametrize("rate", [8_000, 44_100])
def test_turns_of_a_stream(
    family: SmolLM2Whisper, cache_dir: Path, recordings: dict[str, np.ndarray], rate: int
) -> None:
    """Two recordings with 1.5 s between them, in 20 ms frames, heard every 2 s and where a turn ends."""
    pause = np.zeros(RATE * 3 // 2, np.float32)
    speech = np.concatenate([pause, recordings["austen-0870"], pause, recordings["austen-0890"], pause])
    sent = soxr.resample(speech, RATE, rate)
    data = (np.clip(sent, -1, 1) * 32_767).astype("<i2").tobytes()
    decoder, state, endpointer = PcmDecoder(rate), VadState(), Endpointer()
    detector = SpeechDetector(load_vad_file(cache_dir))
    ear, transcripts = family.new_ear(), []
    audio, heard = np.zeros(0, np.float32), 0
    frame = 2 * rate // 50
    for i in range(0, len(data), frame):
        new = decoder.push(data[i : i + frame])
        audio = np.concatenate([audio, new])
        for endpoint in endpointer.push(detector.detect([(state, new)])[0]):
            if endpoint.edge is Edge.STARTED:
                heard = endpoint.position
            elif endpoint.edge is Edge.STOPPED:
                [intake] = family.hear([Hearing("s", ear, audio[heard : endpoint.position], True)])
                transcripts.append(intake.transcript or "")
        if endpointer.is_speaking and len(audio) - heard >= 2 * RATE:
            family.hear([Hearing("s", ear, audio[heard:], False)])
            heard = len(audio)
    assert len(transcripts) == 2
    first, second = (re.sub(r"[^a-z]+", " ", t.lower()).split() for t in transcripts)
    assert {"dashwood", "leisure", "consider", "prudently", "power"} <= set(first)
    assert {"unless", "rather", "hearted", "selfish"} <= set(second)
