"""The torch reference against complex numbers in float64, and against the law it exists for."""

import numpy as np
import pytest
import torch
from rebase_checks import check_moved, formula, raw

from kernels.rebase import Rotation, rebase_keys_reference, rotate_back, turn_table
from kernels.rebase.cases import CORRECTNESS, Case, build


@pytest.mark.parametrize("case", CORRECTNESS, ids=lambda case: case.name)
def test_it_is_the_formula(case: Case) -> None:
    batch = build(case, seed=1)
    before = batch.buffer.clone()
    rebase_keys_reference(batch.key_caches, batch.block_ids, batch.distances, case.rotation)
    check_moved(case, batch, before)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("position, distance", [(5, 5), (4000, 256), (70_000, 69_999), (3, -7)])
def test_a_key_moved_equals_the_key_made_there(is_neox: bool, position: int, distance: int) -> None:
    """R(-d) R(p) k = R(p - d) k, with the turn to p made by the formula."""
    rotation = Rotation(10_000.0 ** -(torch.arange(0, 32, 2, dtype=torch.float64) / 32), is_neox)
    key = np.random.default_rng(0).standard_normal((3, 40))
    at, goal = (torch.from_numpy(formula(key, -p, rotation)) for p in (position, position - distance))
    turns = torch.from_numpy(turn_table(np.array([distance]), rotation))
    torch.testing.assert_close(rotate_back(at, turns, rotation).double(), goal, atol=2e-6, rtol=0)


def test_angles_stay_exact_a_million_tokens_away() -> None:
    """Against arithmetic with 50 digits more than a float32 product has."""
    rotation = Rotation(torch.tensor([1.0, 0.8659643, 1e-4], dtype=torch.float64), True)
    distances = np.array([1, 999_983, 1_000_000])
    frequencies = rotation.frequencies.numpy().astype(np.longdouble)
    angles = distances.astype(np.longdouble)[:, None] * frequencies
    expected = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    assert np.abs(turn_table(distances, rotation) - expected).max() < 7e-8


def test_a_constant_factor_passes_through() -> None:
    """YaRN multiplies cosines and sines when a key is made; moving it must not multiply again."""
    case = Case("float32", ((2, 300),), dtype=torch.float32)
    one, two = build(case, seed=3), build(case, seed=3)
    for cache in two.key_caches:
        cache.mul_(2.0)
    for batch in (one, two):
        rebase_keys_reference(batch.key_caches, batch.block_ids, batch.distances, case.rotation)
    for a, b in zip(one.key_caches, two.key_caches, strict=True):
        assert torch.equal(raw(2.0 * a), raw(b))
