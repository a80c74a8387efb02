"""Our log-mel against transformers' extractor, called as the models' processors call it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.models.log_mel import Ending, LogMel
from engine.models.mel_spectra import MAX_SPANS, mel_filters
from engine.vllm.environment import repair_torch_companions

repair_torch_companions()

LENGTHS = (32_000, 31_999, 16_160, 16_000, 4_801, 1_280, 641, 640, 401, 321)
CALLS = {
    Ending.SILENCE: {"padding": "max_length"},  # Qwen2.5-Omni
    Ending.MIRROR: {"padding": True, "truncation": False},  # Qwen3-Omni
}


@pytest.fixture(scope="module")
def extractor():
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(feature_size=128)


@pytest.fixture(scope="module")
def chunks(recordings: dict[str, np.ndarray]) -> list[np.ndarray]:
    speech = recordings["austen-0870"]
    return [speech[1000 * i :][:length] for i, length in enumerate(LENGTHS)]


def expected(extractor, chunk: np.ndarray, ending: Ending) -> torch.Tensor:
    call = CALLS[ending]
    made = extractor(chunk, sampling_rate=16_000, return_attention_mask=True, return_tensors="pt", **call)
    return made["input_features"][0][:, : int(made["attention_mask"].sum())]


@pytest.mark.parametrize("ending", list(Ending))
def test_chunks_of_any_length_equal_the_extractors(extractor, chunks, ending):
    mel = LogMel(128, ending)
    for chunk, ours in zip(chunks, mel(chunks), strict=True):
        theirs = expected(extractor, chunk, ending)
        assert ours.shape == theirs.shape == (128, mel.num_frames(len(chunk)))
        torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=0)


@pytest.mark.parametrize("ending", list(Ending))
def test_a_chunk_in_a_batch_equals_the_same_chunk_alone(chunks, ending):
    mel = LogMel(128, ending)
    for chunk, together in zip(chunks, mel(chunks), strict=True):
        torch.testing.assert_close(together, mel([chunk])[0], atol=2e-6, rtol=0)


@pytest.mark.parametrize("ending", list(Ending))
def test_what_is_loud_at_the_very_end_counts_as_the_extractor_counts_it(extractor, ending):
    """The cut 8 below the maximum looks at frames behind the last one too, where there are some."""
    quiet = np.full(3_210, 1e-4, np.float32)
    quiet[-3:] = 1.0
    (ours,) = LogMel(128, ending)([quiet])
    torch.testing.assert_close(ours, expected(extractor, quiet, ending), atol=2e-6, rtol=0)


def test_digital_silence(extractor):
    (ours,) = LogMel()([np.zeros(1_600, np.float32)])
    torch.testing.assert_close(ours, expected(extractor, np.zeros(1_600, np.float32), Ending.SILENCE))


def test_filters_equal_transformers(extractor):
    for num_bins in (80, 128):
        from transformers import WhisperFeatureExtractor

        theirs = WhisperFeatureExtractor(feature_size=num_bins).mel_filters
        np.testing.assert_allclose(mel_filters(num_bins), theirs.T, atol=1e-9)


@pytest.mark.parametrize("ending", list(Ending))
def test_a_burst_of_chunks_longer_than_what_is_computed_at_once(chunks, ending):
    """More chunks than a batch, more frames than a part of it: none may see its neighbours."""
    burst = [chunk * (i % 5 + 1) / 5 for i in range(2 * MAX_SPANS // len(chunks) + 1) for chunk in chunks]
    mel = LogMel(128, ending)
    for chunk, together in zip(burst, mel(burst), strict=True):
        torch.testing.assert_close(together, mel([chunk])[0], atol=2e-6, rtol=0)


@pytest.mark.parametrize("num_samples", [1, 2, 160, 200, 201])
def test_less_than_a_window(extractor, num_samples):
    """Its mirror reaches into the silence behind it."""
    chunk = np.linspace(0.5, -0.3, num_samples, dtype=np.float32)
    (ours,) = LogMel()([chunk])
    torch.testing.assert_close(ours, expected(extractor, chunk, Ending.SILENCE), atol=2e-6, rtol=0)


def test_what_was_given_out_stays_when_the_next_batch_is_computed(chunks):
    mel = LogMel()
    given = mel(chunks)
    kept = [one.clone() for one in given]
    mel([np.ones_like(chunk) for chunk in chunks])
    for one, before in zip(given, kept, strict=True):
        assert one.is_contiguous()
        torch.testing.assert_close(one, before, atol=0, rtol=0)


def test_no_chunks():
    assert LogMel()([]) == []


def test_an_engine_that_loads_in_another_thread_changes_nothing(chunks):
    """It sets the process's default dtype; a buffer of another would stay for ever."""
    expected = LogMel()(chunks)
    torch.set_default_dtype(torch.bfloat16)
    try:
        mel = LogMel()
        mel(chunks[:1])
    finally:
        torch.set_default_dtype(torch.float32)
    for ours, theirs in zip(mel(chunks), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


def test_frames_computed_in_whole_units_as_on_a_gpu_are_the_same(chunks):
    expected = LogMel()(chunks)
    mel = LogMel()
    mel._spectra._frames_unit = 256
    for _ in range(2):
        for ours, theirs in zip(mel(chunks), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    assert mel._spectra._buffers["mel"].numel() % 256 == 0
