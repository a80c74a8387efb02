"""MiniCPM-o's features against the extractors that its checkpoints document."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.types import SAMPLE_RATE
from engine.vllm.environment import prepare_process, repair_torch_companions

prepare_process("cpu")
repair_torch_companions()


class Published:
    """openbmb/MiniCPM-o-4_5, processing_minicpmo.py: `StreamingMelProcessorExact` as the duplex mode sets it
    up (chunks of a second, the first 1,035 ms cut to whole frames, 20 ms of redundancy, a window of 30 s that
    slides by 10), over transformers' own extractor: all of the window, anew for each chunk.
    """

    def __init__(self) -> None:
        from transformers import WhisperFeatureExtractor

        self._extractor = WhisperFeatureExtractor(feature_size=80)
        self._buffer = np.zeros(0, np.float32)
        self._dropped = 0  # frames
        self._emitted = 0  # frames

    def process(self, chunk: np.ndarray) -> torch.Tensor:
        self._buffer = np.concatenate([self._buffer, chunk])
        if len(self._buffer) >= 30 * SAMPLE_RATE:
            self._buffer = self._buffer[10 * SAMPLE_RATE :]
            self._dropped += 1000
        mel = self._extract()
        start = max(0, self._emitted - 2) - self._dropped
        end = self._emitted + 102 - self._dropped
        self._emitted += 100
        stable = (len(self._buffer) - 200) // 160 + 1  # frames that need no audio to come
        assert end <= stable
        return mel[:, start:end]

    def _extract(self) -> torch.Tensor:
        """`MiniCPMAAudioProcessor`: Whisper's, but cut at a fixed -10 while the window is below 5 s."""
        audio = torch.from_numpy(self._buffer)
        if len(audio) >= 5 * SAMPLE_RATE:
            options = {"sampling_rate": SAMPLE_RATE, "padding": False, "return_tensors": "pt"}
            return self._extractor(self._buffer, **options)["input_features"][0]
        stft = torch.stft(audio, 400, 160, window=torch.hann_window(400), return_complex=True)
        power = stft[..., :-1].abs() ** 2
        mel = torch.from_numpy(self._extractor.mel_filters).float().T @ power
        return (mel.clamp(min=1e-10).log10().clamp(min=-10.0) + 4.0) / 4.0


@pytest.fixture(scope="module")
def speech(recordings: dict[str, np.ndarray]) -> np.ndarray:
    """75 s of talk, each second as loud as it likes, so that the floor matters."""
    talk = np.concatenate([np.asarray(audio, np.float32) for audio in recordings.values()])
    talk = np.resize(talk, 76 * SAMPLE_RATE)
    gains = 10 ** np.random.default_rng(0).uniform(-3, 0, 76)
    return (talk * np.repeat(gains, SAMPLE_RATE)).astype(np.float32)


def units_of(audio: np.ndarray) -> list[np.ndarray]:
    from engine.models.minicpmo_mel import FIRST_SAMPLES

    starts = range(FIRST_SAMPLES, len(audio) - SAMPLE_RATE + 1, SAMPLE_RATE)
    return [audio[:FIRST_SAMPLES], *(audio[start : start + SAMPLE_RATE] for start in starts)]


def test_a_stream_equals_the_published_processor_through_two_slides_of_its_window(speech):
    from engine.models.minicpmo_mel import MARGIN, NUM_FRAMES, MelStream, StreamingLogMel

    theirs, stream, mel = Published(), MelStream(), StreamingLogMel()
    floors = 0
    for i, unit in enumerate(units_of(speech)):
        expected = theirs.process(unit)
        ((got, is_first),) = mel([(stream, unit)])
        assert is_first == (i == 0)
        assert got.shape == (80, NUM_FRAMES) and got.dtype == torch.float32
        if is_first:
            assert (got[:, :MARGIN] == 0).all()
            got = got[:, MARGIN:]
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
        floors += int((got == got.min()).sum() > 100)
    assert i == 74 and floors > 20  # in many units the floor cuts


def test_streams_side_by_side_and_units_together_equal_each_alone(speech):
    from engine.models.minicpmo_mel import MelStream, StreamingLogMel

    mel = StreamingLogMel()
    parts = [speech[i * 5 * SAMPLE_RATE : (i * 5 + 9) * SAMPLE_RATE] for i in range(4)]
    alone = []
    for part in parts:
        stream = MelStream()
        alone.append([mel([(stream, unit)])[0][0] for unit in units_of(part)])
    streams = [MelStream() for _ in parts]
    batch = [(stream, unit) for stream, part in zip(streams, parts, strict=True) for unit in units_of(part)]
    together = [got for got, _ in mel(batch)]
    for a, b in zip([unit for of_one in alone for unit in of_one], together, strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_a_stream_keeps_next_to_nothing_however_long_it_is(speech):
    from engine.models.minicpmo_mel import CONTEXT, MelStream, StreamingLogMel

    stream, mel = MelStream(), StreamingLogMel()
    units = units_of(speech)
    for unit in [*units, *units[1:], *units[1:]]:
        mel([(stream, unit)])
    assert len(stream.context) == CONTEXT < 0.1 * SAMPLE_RATE
    assert len(stream.peaks) <= 30 and stream.num_units < 40


def test_a_second_of_2_6_equals_whispers_extractor_on_it_alone(speech):
    """openbmb/MiniCPM-o-2_6, processing_minicpmo.py, `audio_feature_extract`: padded to 30 s, then cut."""
    from transformers import WhisperFeatureExtractor

    from engine.models.log_mel import Ending, LogMel

    extractor, mel = WhisperFeatureExtractor(feature_size=80), LogMel(80, Ending.SILENCE)
    for start in range(0, 10 * SAMPLE_RATE, SAMPLE_RATE):
        chunk = speech[start : start + SAMPLE_RATE]
        out = extractor(
            chunk,
            sampling_rate=SAMPLE_RATE,
            padding="max_length",
            return_attention_mask=True,
            return_tensors="pt",
        )
        length = int(out["attention_mask"].sum())
        assert length == 100
        torch.testing.assert_close(mel([chunk])[0], out["input_features"][0, :, :length], atol=1e-5, rtol=0)
