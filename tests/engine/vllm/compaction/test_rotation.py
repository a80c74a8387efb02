"""vLLM's rotary modules, as `get_rope` makes them: what their tables say, and which are refused."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kernels.rebase import rotate_back, turn_table

pytestmark = pytest.mark.vllm

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "GPT-J": {"is_neox_style": False},
    "partial": {"partial_rotary_factor": 0.25},
    "partial GPT-J": {"partial_rotary_factor": 0.5, "is_neox_style": False},
    "large theta": {"rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "YaRN": YARN,
    "YaRN GPT-J, partial": YARN | {"is_neox_style": False, "partial_rotary_factor": 0.5},
    "NTK": {"rope_type": "ntk", "factor": 4.0},
    "dynamic NTK, fixed by vLLM": {"rope_type": "dynamic", "factor": 4.0},
    "Llama 3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
    "Gemma 4": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    "M-RoPE in sections": {"mrope_section": [8, 12, 12]},
    "M-RoPE interleaved": {"mrope_section": [12, 10, 10], "mrope_interleaved": True},
    "M-RoPE with YaRN": YARN | {"mrope_section": [8, 12, 12]},
}


@pytest.fixture(autouse=True)
def config() -> Iterator[None]:
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        yield


def rope(dtype: torch.dtype = torch.bfloat16, head_size: int = 64, **options: Any) -> Any:
    from vllm.model_executor.layers.rotary_embedding import get_rope

    is_neox = options.pop("is_neox_style", True)
    return get_rope(head_size, 8192, is_neox, {"rope_theta": 10_000.0} | options, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_keys_made_at_one_place_and_moved_to_another(kind: str, dtype: torch.dtype) -> None:
    from engine.vllm.compaction.rotation import read_rotation

    rotary = rope(dtype, **KINDS[kind])
    rotation = read_rotation(rotary)
    torch.manual_seed(1)
    position = torch.tensor([17, 300, 1000, 1999])
    distance = torch.tensor([17, 256, 999, 0])
    keys = torch.randn(4, 3 * 64).to(dtype)

    def made_at(positions: torch.Tensor) -> torch.Tensor:
        positions = positions.expand(3, -1) if "mrope_section" in KINDS[kind] else positions
        return rotary(positions, keys.clone(), keys.clone())[1].view(4, 3, 64).float()

    turns = torch.from_numpy(turn_table(distance.numpy(), rotation))[:, None]
    moved, expected = rotate_back(made_at(position), turns, rotation), made_at(position - distance)
    # cos, sin, and the key made of them, each rounded once.
    bound = 2e-4 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    assert (moved - expected).abs().max() < bound * expected.abs().max()


@pytest.mark.parametrize("dtype, error", [(torch.float32, 2e-9), (torch.bfloat16, 5e-8)])
@pytest.mark.parametrize("factor", [1.0, 8.0])
def test_the_fitted_slope_is_the_inverse_frequency(factor: float, dtype: torch.dtype, error: float) -> None:
    """So that a window's length away, a bf16 table's fit is off by 1e-4 radians at the most."""
    from engine.vllm.compaction.rotation import read_rotation

    rotation = read_rotation(rope(dtype, rope_type="linear", factor=factor))
    own = 1.0 / 10_000.0 ** (torch.arange(0, 64, 2) / 64)  # float32, as vLLM's
    assert (rotation.frequencies - own.double() / factor).abs().max() < error


def test_yarns_factor_is_not_applied_again() -> None:
    from engine.vllm.compaction.rotation import read_rotation

    rotary = rope(torch.float32, **YARN)
    assert rotary.mscale > 1.1
    rotation = read_rotation(rotary)
    turns = turn_table(np.array([123]), rotation)
    assert np.allclose(np.hypot(*np.split(turns, 2, axis=1)), 1.0, atol=1e-6)


class Refused:
    """Modules that look like vLLM's rotary ones."""

    @staticmethod
    def longrope() -> Any:
        from vllm.model_executor.layers.rotary_embedding import phi3_long_rope_scaled_rope as phi3

        module = phi3.Phi3LongRoPEScaledRotaryEmbedding.__new__(phi3.Phi3LongRoPEScaledRotaryEmbedding)
        nn.Module.__init__(module)
        module.rotary_dim = 64
        module.register_buffer("long_short_cos_sin_cache", torch.zeros(10, 64))
        return module

    @staticmethod
    def bent() -> Any:
        """Frequencies that change half way, as where a model switches factors by length."""
        rotary = _copy(rope(torch.float32))
        rotary.cos_sin_cache[4000:] = rotary.cos_sin_cache[3990:8182].clone()
        return rotary

    @staticmethod
    def growing() -> Any:
        rotary = _copy(rope(torch.float32))
        rotary.cos_sin_cache *= torch.linspace(1, 1.5, 8192)[:, None]
        return rotary

    @staticmethod
    def shrinking_key() -> Any:
        """xPos-like: the table is a rotation, the key is scaled by its position beside it."""
        rotary = _copy(rope(torch.float32))
        inner = rotary.forward
        rotary.forward = lambda p, q, k: (q, inner(p, q, k)[1] * (1 - p / 20_000)[:, None])
        return rotary

    @staticmethod
    def other_pairs() -> Any:
        rotary = _copy(rope(torch.float32))
        inner = rotary.forward
        rotary.forward = lambda p, q, k: (q, inner(p, q, k)[1].flip(-1))
        return rotary


def _copy(rotary: Any) -> Any:
    import copy

    return copy.deepcopy(rotary)


@pytest.mark.parametrize(
    "name, why",
    [
        ("longrope", "no single table"),
        ("bent", "off a line"),
        ("growing", "off a line"),
        ("shrinking_key", "more than turn"),
        ("other_pairs", "more than turn"),
    ],
)
def test_what_cannot_be_moved_is_refused_with_a_reason(name: str, why: str) -> None:
    from engine.vllm.compaction.rotation import UnmovableKeys, read_rotation

    with pytest.raises(UnmovableKeys, match=why):
        read_rotation(getattr(Refused, name)())


def layer(*rotaries: nn.Module, alibi: Any = None) -> tuple[nn.Module, dict[str, nn.Module]]:
    """A model of one attention layer with these rotary modules beside it."""
    block, attention = nn.Module(), nn.Module()
    attention.impl = SimpleNamespace(alibi_slopes=alibi)  # type: ignore[assignment]
    block.attn = attention
    for index, rotary in enumerate(rotaries):
        setattr(block, f"rotary_{index}", rotary)
    return nn.ModuleList([block]), {"layers.0.attn": attention}


def test_a_layer_finds_the_rotary_module_beside_it() -> None:
    from engine.vllm.compaction.rotation import rotations

    model, layers = layer(rope(torch.float32))
    (rotation,) = rotations(model, layers).values()
    assert rotation.rotary_dim == 64 and rotation.is_neox


def test_learned_positions_alibi_and_two_rotaries_are_refused() -> None:
    from engine.vllm.compaction.rotation import UnmovableKeys, rotations

    with pytest.raises(UnmovableKeys, match=r"layers\.0\.attn has no rotary module"):
        rotations(*layer())
    with pytest.raises(UnmovableKeys, match="ALiBi"):
        rotations(*layer(rope(torch.float32), alibi=[1.0]))
    with pytest.raises(UnmovableKeys, match="more than one"):
        rotations(*layer(rope(torch.float32), rope(torch.float32, rope_theta=5e5)))
