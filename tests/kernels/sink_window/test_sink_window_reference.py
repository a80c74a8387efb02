"""The torch reference against the definition, in float64."""

import pytest
import torch
from sink_window_checks import formula, reference, relative_error

from kernels.sink_window.cases import CORRECTNESS, Case, build
from kernels.sink_window.reference import visible_mask


@pytest.mark.parametrize("case", CORRECTNESS, ids=lambda case: case.name)
def test_reference_is_the_formula(case: Case) -> None:
    batch = build(case, seed=1)
    assert relative_error(reference(case, batch), formula(case, batch)) < 1e-12


def test_mask_by_hand() -> None:
    mask = visible_mask(torch.tensor([4, 5]), torch.arange(7), num_sink_tokens=1, window=3)
    assert mask.int().tolist() == [[1, 0, 1, 1, 1, 0, 0], [1, 0, 0, 1, 1, 1, 0]]
    unlimited = visible_mask(torch.tensor([2]), torch.arange(4), num_sink_tokens=0, window=None)
    assert unlimited.int().tolist() == [[1, 1, 1, 0]]
