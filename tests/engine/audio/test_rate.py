"""The declared rate against the bytes that come."""

from __future__ import annotations

import pytest

from engine.audio.rate import RateMeter


def measure(declared: int, sent: int, seconds: float = 10.0, chunk_s: float = 0.02) -> list[float]:
    meter = RateMeter(declared)
    found = []
    for i in range(round(seconds / chunk_s)):
        if (rate := meter.push(round(2 * sent * chunk_s), i * chunk_s)) is not None:
            found.append(rate)
    assert meter.num_mismatches == len(found)
    return found


def test_the_right_rate_is_never_complained_about():
    assert measure(16_000, 16_000) == []
    assert measure(48_000, 47_500) == []


@pytest.mark.parametrize(("declared", "sent"), [(48_000, 16_000), (16_000, 48_000), (16_000, 24_000)])
def test_a_wrong_rate_is_measured(declared: int, sent: int):
    assert measure(declared, sent) == pytest.approx([sent] * 3, rel=0.01)


def test_pauses_and_bursts_are_no_contradiction():
    meter = RateMeter(16_000)
    now = 0.0
    for _ in range(20):
        now += 1.0  # a client that mutes between words, and sends each as one message
        assert meter.push(9_999, now) is None
