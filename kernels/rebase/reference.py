"""Moving cached keys to earlier positions, in plain torch: what the kernel must compute.

A rotary key at position p is R(p) k: each pair of its dimensions is turned by p times the pair's frequency.
Turns add up, so R(-d) R(p) k = R(p - d) k, whatever constant factor (YaRN's) or scale (fp8's) k carries.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0  # a conversion beyond it would give NaN


@dataclass(frozen=True, eq=False)
class Rotation:
    """How a model turns its keys. Linear and YaRN scaling are other frequencies, nothing else."""

    frequencies: torch.Tensor  # float64 [rotary_dim / 2] on the CPU, radians per token ("inv_freq")
    is_neox: bool  # pairs are (i, i + rotary_dim / 2); otherwise GPT-J's, (2 i, 2 i + 1)

    @property
    def rotary_dim(self) -> int:
        """The first dimensions of a head, which are turned; the others carry no position."""
        return 2 * len(self.frequencies)


def turn_table(distances: np.ndarray, rotation: Rotation) -> np.ndarray:
    """Cosines, then sines, of every pair's turn over distances [n] in tokens: float32 [n, rotary_dim].

    The angle is a float64 product, reduced by float64 cosines: at 1,000,000 tokens it is off by 1e-10, where
    a float32 product would be off by 0.03 radians.
    """
    angles = distances.astype(np.float64)[:, None] * rotation.frequencies.numpy()
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def rotate_back(keys: torch.Tensor, turns: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Keys turned back: float32 [..., head_size].

    `turns` is rows of `turn_table`, float32 [..., rotary_dim], and broadcasts against the keys.
    """
    out = keys.to(torch.float32, copy=True)
    cos, sin = turns.chunk(2, dim=-1)
    half, dim = rotation.rotary_dim // 2, rotation.rotary_dim
    first, second = (
        (slice(0, half), slice(half, dim)) if rotation.is_neox else (slice(0, dim, 2), slice(1, dim, 2))
    )
    a, b = out[..., first].clone(), out[..., second].clone()
    out[..., first], out[..., second] = a * cos + b * sin, b * cos - a * sin
    return out


def rounded(keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 keys in the cache's dtype. fp8 saturates, as when vLLM writes it; NaN stays."""
    return (keys.clamp(-FP8_MAX, FP8_MAX) if dtype == FP8 else keys).to(dtype)


def rebase_keys_reference(
    key_caches: list[torch.Tensor], block_ids: list[int], distances: list[int], rotation: Rotation
) -> None:
    """Turn the keys of whole blocks back in place, each block by its own distance in tokens, in every layer.

    A cache is [num_blocks, block_size, num_kv_heads, head_size], of any strides.
    """
    turns = torch.from_numpy(turn_table(np.asarray(distances), rotation)).to(key_caches[0].device)
    for cache in key_caches:
        for block, turn in zip(block_ids, turns, strict=True):
            cache[block] = rounded(rotate_back(cache[block], turn, rotation), cache.dtype)
