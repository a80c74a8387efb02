"""What the rebase tests share: an independent formula and the comparison of whole caches."""

import numpy as np
import torch

from kernels.rebase.cases import Batch, Case
from kernels.rebase.reference import FP8, FP8_MAX, Rotation

# Largest relative and absolute error of one rounding to nearest.
ROUNDING = {
    torch.bfloat16: (2.0**-8, 2.0**-134),
    torch.float16: (2.0**-11, 2.0**-25),
    torch.float32: (2.0**-24, 2.0**-150),
    FP8: (2.0**-4, 2.0**-10),
}


def formula(keys: np.ndarray, distance: int, rotation: Rotation) -> np.ndarray:
    """float64 keys [..., head_size] moved back by a distance: pairs as complex numbers times exp(-i d f)."""
    out, dim = np.array(keys, dtype=np.float64), rotation.rotary_dim
    first = np.arange(dim // 2) if rotation.is_neox else np.arange(0, dim, 2)
    second = first + (dim // 2 if rotation.is_neox else 1)
    pairs = out[..., first] + 1j * out[..., second]
    pairs = pairs * np.exp(-1j * distance * rotation.frequencies.numpy())
    out[..., first], out[..., second] = pairs.real, pairs.imag
    return out


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Bits, so that NaN compares; dense."""
    return tensor.contiguous().view(torch.uint8)


def check_moved(case: Case, batch: Batch, before: torch.Tensor) -> None:
    """Moved keys are the formula's, rounded once; everything else in the buffer has its old bits."""
    relative, absolute = ROUNDING[case.dtype]
    size, rotation = case.head_size, case.rotation
    for layer, old in zip(batch.buffer, before, strict=True):
        moved = set(batch.block_ids)
        others = [block for block in range(len(layer)) if block not in moved]
        assert torch.equal(raw(layer[others]), raw(old[others]))
        assert torch.equal(raw(layer[..., size:]), raw(old[..., size:]))  # values
        skipped = slice(rotation.rotary_dim, size)
        finite = old[..., skipped].float().nan_to_num(nan=7.0)
        assert torch.equal(layer[..., skipped].float().nan_to_num(nan=7.0), finite)
        for block, distance in zip(batch.block_ids, batch.distances, strict=True):
            keys = old[block][..., :size].double().cpu().numpy()
            expected = formula(keys, distance, rotation)
            found = layer[block][..., :size].double().cpu().numpy()
            assert np.array_equal(np.isnan(found), np.isnan(expected))
            if case.dtype == FP8:
                expected = expected.clip(-FP8_MAX, FP8_MAX)
            # float32 turns a pair with an error of its length, not of the one coordinate.
            length = np.abs(keys).max(axis=-1, keepdims=True)
            bound = 1.001 * (relative * np.abs(expected) + absolute) + 3e-7 * length
            assert not (np.abs(found - expected) > bound).any(), (block, distance)
