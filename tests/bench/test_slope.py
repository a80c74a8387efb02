"""The slope by which an endless day is judged: nothing grows where nothing moved, and what grows is seen."""

from __future__ import annotations

import numpy as np

from bench.endless_day_meter import slope

HOURS = [0.5 * i for i in range(1, 43)]


def of(values: np.ndarray) -> dict[str, float]:
    rows = [{"hours": hour, "figure": float(value)} for hour, value in zip(HOURS, values, strict=True)]
    found = slope(rows, "figure")
    assert found is not None
    return found


def test_what_never_moved_has_no_slope_at_all():
    found = of(np.full(42, 719.9883))
    assert (found["per_hour"], found["low"], found["high"]) == (0.0, 0.0, 0.0)


def test_a_leak_under_noise_is_seen():
    noise = np.random.default_rng(1).normal(0, 0.05, 42)
    found = of(700 + 0.1 * np.array(HOURS) + noise)
    assert 0 < found["low"] < 0.1 < found["high"]


def test_noise_alone_passes_in_nearly_all_of_many_runs():
    random = np.random.default_rng(2)
    num_growing = sum(of(5 + random.normal(0, 1, 42))["low"] > 0 for _ in range(400))
    assert num_growing < 40  # 2.5 % at the nominal level; Newey-West's intervals are a little short


def test_a_few_rows_tell_nothing():
    assert slope([{"hours": 1.0, "figure": 2.0}] * 7, "figure") is None
