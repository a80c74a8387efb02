"""How a loaded model turns its keys: read from its rotary modules' own tables, and proven on real keys.

The table holds cos and sin of every position. Where its angles lie on a line through 0, a key is moved by
turning it back. Linear, YaRN, NTK and Llama 3 scaling are such lines with other slopes (vLLM fixes even
"dynamic" NTK when it loads the model), and a constant factor (YaRN's) is in the key already. Where they do
not, or where there is no such table, keys stay where they were made, and the engine says so at start.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

from engine.engine import EngineError
from kernels.rebase import Rotation, rotate_back, turn_table

_MAX_ROWS = 32_768  # of a table; longer ones are judged by their beginning
_NUM_HEADS = 2  # of the keys that the proof turns


class UnmovableKeys(EngineError):
    """This model's keys cannot be moved to other positions. The message says why."""


def rotations(model: nn.Module, layers: dict[str, nn.Module]) -> dict[str, Rotation]:
    """The rotation of each attention layer (vLLM's Attention modules by name) of a loaded model.

    Layers that share a rotary module share the Rotation. Raises UnmovableKeys.
    """
    parents = {id(child): parent for parent in model.modules() for child in parent.children()}
    known: dict[int, Rotation] = {}
    found: dict[str, Rotation] = {}
    for name, layer in layers.items():
        if getattr(getattr(layer, "impl", None), "alibi_slopes", None) is not None:
            raise UnmovableKeys(f"{name} uses ALiBi, whose distances are read from the block table")
        rotary = _rotary_module(name, parents.get(id(layer)))
        if id(rotary) not in known:
            known[id(rotary)] = read_rotation(rotary)
        found[name] = known[id(rotary)]
    return found


def read_rotation(rotary: Any) -> Rotation:
    """What a rotary module of vLLM's does, checked against the module itself. Raises UnmovableKeys."""
    kind = type(rotary).__name__
    table = getattr(rotary, "cos_sin_cache", None)
    dim = getattr(rotary, "rotary_dim", None)
    if not isinstance(table, torch.Tensor) or table.dim() != 2 or not table.is_floating_point():
        raise UnmovableKeys(
            f"{kind} has no single table of positions: its turns depend on the length of the text, or on "
            "more than the position"
        )
    if table.shape[1] != dim or len(table) < 2:
        raise UnmovableKeys(f"{kind} has a table of shape {tuple(table.shape)} for {dim} rotary dimensions")
    eps = torch.finfo(table.dtype).eps
    rows = table[:_MAX_ROWS].double().cpu().numpy()
    # The table's own rounding, and that of float32 products, which grows with the position.
    tolerance = 2 * eps + len(rows) * 2.0**-23
    frequencies, error = fit_line(rows)
    if not error < tolerance:
        raise UnmovableKeys(
            f"{kind} does not turn keys in proportion to their position: angles are off a line by {error:.3g}"
        )
    rotation = Rotation(torch.from_numpy(frequencies), bool(rotary.is_neox_style))
    error = _largest_error(rotary, rotation, len(rows))
    if not error < 8 * eps + len(rows) * 2.0**-22:
        raise UnmovableKeys(
            f"keys that {kind} made at one position and keys turned back to it differ by {error:.3g}: it "
            "does more than turn pairs of dimensions"
        )
    return rotation


def fit_line(table: np.ndarray) -> tuple[np.ndarray, float]:
    """Radians per token of each pair, and the largest deviation of an angle or a length from that line.

    `table` is float64 [positions, 2 * pairs], cosines and sines times any constant. The fit widens its reach
    step by step, so that a whole turn is never miscounted; rounding averages out over thousands of positions,
    which makes the slope of a bf16 table good to about 1e-8.
    """
    cos, sin = np.split(table, 2, axis=1)
    angles, lengths = np.arctan2(sin, cos), np.hypot(cos, sin)
    slope, reach = angles[1], 4
    while True:
        reach = min(reach, len(table))
        position = np.arange(reach, dtype=np.float64)[:, None]
        off = np.remainder(angles[:reach] - position * slope + math.pi, 2 * math.pi) - math.pi
        slope = slope + (position * off).sum(axis=0) / (position**2).sum()
        if reach == len(table):
            break
        reach *= 4
    off = np.remainder(angles - np.arange(len(table))[:, None] * slope + math.pi, 2 * math.pi) - math.pi
    unequal = np.abs(lengths / lengths.mean() - 1.0)
    return slope, float(max(np.abs(off).max(), unequal.max()))


@torch.inference_mode()
def _largest_error(rotary: Any, rotation: Rotation, num_positions: int) -> float:
    """Keys made by the module at p and turned back by d, against the same keys made at p - d; in the cache's
    rounding, relative to the largest number in them."""
    last, table = num_positions - 1, rotary.cos_sin_cache
    pairs = sorted({(p, d) for p in (1, last // 3, last) for d in (0, 1, p // 2, p) if d <= p})
    from_, distance = (torch.tensor(column, device=table.device) for column in zip(*pairs, strict=True))
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn((len(pairs), _NUM_HEADS * rotary.head_size), generator=generator)
    keys = keys.to(table.device, table.dtype)  # the module would convert its table to another dtype for good

    def made_at(positions: torch.Tensor) -> torch.Tensor:
        if getattr(rotary, "mrope_section", None):
            positions = positions.expand(3, -1)  # audio moves all three axes together
        _, made = rotary(positions, keys.clone(), keys.clone())
        return made.view(len(pairs), _NUM_HEADS, -1)

    turns = torch.from_numpy(turn_table(distance.cpu().numpy(), rotation)).to(table.device)
    moved = rotate_back(made_at(from_), turns[:, None], rotation)
    expected = made_at(from_ - distance).float()
    return float((moved - expected).abs().max() / expected.abs().max())


def _rotary_module(name: str, parent: nn.Module | None) -> nn.Module:
    """The one rotary module beside a layer's attention."""
    candidates: Iterable[nn.Module] = parent.children() if parent is not None else ()
    rotaries = {id(child): child for child in candidates if _is_rotary(child)}
    if not rotaries:
        raise UnmovableKeys(
            f"{name} has no rotary module beside it: its positions are learned, absolute or added elsewhere"
        )
    if len(rotaries) > 1:
        kinds = " and ".join(type(rotary).__name__ for rotary in rotaries.values())
        raise UnmovableKeys(f"{name} has more than one rotary module beside it: {kinds}")
    return next(iter(rotaries.values()))


def _is_rotary(module: nn.Module) -> bool:
    package = "vllm.model_executor.layers.rotary_embedding"
    kinds = {kind.__module__ for kind in type(module).__mro__}
    return any(kind == package or kind.startswith(f"{package}.") for kind in kinds)
