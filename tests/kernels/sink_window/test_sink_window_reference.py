"""The torch reference against the definition, in float64."""

import pytest
import torch
from sink_window_checks import formula, relative_error

from kernels.sink_window import sink_window_attention_reference
from kernels.sink_window.cases import CORRECTNESS, Case, build
from kernels.sink_window.launcher import FP8
from kernels.sink_window.reference import visible_mask


@pytest.mark.parametrize("case", CORRECTNESS, ids=lambda case: case.name)
def test_reference_is_the_formula(case: Case) -> None:
    batch = build(case, seed=1)
    fp8 = batch.key_cache.dtype == FP8
    out = sink_window_attention_reference(
        batch.query,
        batch.key_cache,
        batch.value_cache,
        batch.cu_seqlens_q,
        batch.seq_lens,
        batch.block_table,
        batch.num_sink_tokens,
        case.window,
        batch.scale,
        float(batch.k_scale) if fp8 else 1.0,
        float(batch.v_scale) if fp8 else 1.0,
    )
    assert relative_error(out, formula(case, batch)) < 1e-12


def test_mask_by_hand() -> None:
    mask = visible_mask(torch.tensor([4, 5]), torch.arange(7), num_sink_tokens=1, window=3)
    assert mask.int().tolist() == [[1, 0, 1, 1, 1, 0, 0], [1, 0, 0, 1, 1, 1, 0]]
    unlimited = visible_mask(torch.tensor([2]), torch.arange(4), num_sink_tokens=0, window=None)
    assert unlimited.int().tolist() == [[1, 1, 1, 0]]
