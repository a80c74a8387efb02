"""PcmDecoder: exact samples, whatever the messages."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import soxr
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.audio.resample import PcmDecoder, limited

RATES = [8_000, 11_025, 12_345, 16_000, 22_050, 24_000, 32_000, 44_100, 47_999, 48_000]


def noise(num_samples: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(-32_768, 32_768, num_samples).astype("<i2").tobytes()


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("num_samples", [0, 1, 2, 37, 5_000, 48_001])
def test_same_samples_as_soxr_in_one_go(rate: int, num_samples: int) -> None:
    data = noise(num_samples)
    decoder = PcmDecoder(rate)
    got = np.concatenate([decoder.push(data), decoder.flush()])
    whole = np.frombuffer(data, "<i2").astype(np.float32) / 32_768
    want = soxr.resample(whole, rate, 16_000, quality="HQ") if num_samples else whole
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, want)


@settings(max_examples=60, deadline=None)
@given(
    rate=st.sampled_from(RATES),
    num_bytes=st.integers(0, 9_001),
    cuts=st.lists(st.integers(0, 9_001), max_size=12),
)
def test_any_split_gives_the_same_samples(rate: int, num_bytes: int, cuts: list[int]) -> None:
    data = noise(4_501)[:num_bytes]
    edges = [0, *sorted(min(c, num_bytes) for c in cuts), num_bytes]
    split, whole = PcmDecoder(rate), PcmDecoder(rate)
    parts = [split.push(data[a:b]) for a, b in itertools.pairwise(edges)]
    np.testing.assert_array_equal(
        np.concatenate([*parts, split.flush()]), np.concatenate([whole.push(data), whole.flush()])
    )


@settings(max_examples=60, deadline=None)
@given(rate=st.sampled_from(RATES), messages=st.lists(st.binary(max_size=65), max_size=20))
def test_no_bytes_make_it_raise(rate: int, messages: list[bytes]) -> None:
    decoder = PcmDecoder(rate)
    samples = np.concatenate([decoder.push(b"")] + [decoder.push(m) for m in messages] + [decoder.flush()])
    assert np.isfinite(samples).all()


def test_an_odd_byte_waits_for_its_other_half() -> None:
    decoder = PcmDecoder(16_000)
    assert len(decoder.push(b"\x00")) == 0
    np.testing.assert_array_equal(decoder.push(b"\x40\x00"), [0.5])
    np.testing.assert_array_equal(decoder.push(memoryview(b"\xc0")), [-0.5])


def test_flush_makes_it_new() -> None:
    data = noise(1_000)
    decoder = PcmDecoder(44_100)
    first = np.concatenate([decoder.push(data + b"\x01"), decoder.flush()])
    second = np.concatenate([decoder.push(data), decoder.flush()])
    np.testing.assert_array_equal(first, second)


def test_delay_and_state_stay_bounded() -> None:
    decoder = PcmDecoder(48_000)
    chunk = noise(960)
    num_samples = sum(len(decoder.push(chunk)) for _ in range(3_000))
    assert 0 <= 3_000 * 320 - num_samples < 0.05 * 16_000


@pytest.mark.parametrize("rate", [0, -1, 7_999, 48_001])
def test_refuses_rates_outside_the_range(rate: int) -> None:
    with pytest.raises(ValueError, match="8000 and 48000"):
        PcmDecoder(rate)


def test_audio_is_limited_to_numbers_between_minus_one_and_one():
    fine = np.array([-1.0, 0.25, 1.0], np.float32)
    assert limited(fine) is fine
    assert not len(limited(fine[:0]))
    wild = np.array([np.nan, np.inf, -np.inf, 1.5, -2.0, 0.25], np.float32)
    assert limited(wild).tolist() == [0.0, 1.0, -1.0, 1.0, -1.0, 0.25]
    assert limited(wild).dtype == np.float32
    assert limited(fine * np.float32(np.nan)).tolist() == [0.0, 0.0, 0.0]
