"""Shapes that the tests and the benchmark share, and the caches built from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.rebase.reference import FP8, Rotation, rounded


@dataclass(frozen=True)
class Case:
    """Layers of one shape, and one (num_blocks, distance in tokens) per session."""

    name: str
    moves: tuple[tuple[int, int], ...]
    num_layers: int = 2
    num_kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16
    rotary_dim: int | None = None  # None: the whole head
    is_neox: bool = True
    layout: str = "NHD"  # vLLM's default, [block][slot][head][key, value]; HND: [block][head][slot]...
    theta: float = 10_000.0
    factor: float = 1.0  # of linear scaling
    dtype: torch.dtype = torch.bfloat16

    @property
    def rotation(self) -> Rotation:
        dim = self.rotary_dim or self.head_size
        exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        return Rotation(self.theta**-exponents / self.factor, self.is_neox)


@dataclass(frozen=True)
class Batch:
    """A case's caches: views of one buffer with keys and values side by side, as vLLM's."""

    buffer: torch.Tensor  # all layers, [num_layers, num_blocks, ...]
    key_caches: list[torch.Tensor]  # [num_blocks, block_size, num_kv_heads, head_size] by layer
    block_ids: list[int]
    distances: list[int]  # of each of block_ids


SESSIONS = ((3, 256), (1, 16), (2, 1), (1, 1_000_000), (1, 0), (2, 999_983), (1, -48))
CORRECTNESS = (
    Case("bf16", SESSIONS),
    Case("fp16", SESSIONS, dtype=torch.float16),
    Case("float32", SESSIONS, dtype=torch.float32),
    Case("fp8", SESSIONS, dtype=FP8),
    Case("gpt-j", SESSIONS, is_neox=False),
    Case("gpt-j fp8", SESSIONS, is_neox=False, dtype=FP8),
    Case("partial", SESSIONS, rotary_dim=16),
    Case("partial gpt-j, odd", SESSIONS, rotary_dim=48, is_neox=False, num_kv_heads=3),
    Case("head-80", SESSIONS, head_size=80, num_kv_heads=5, block_size=32),
    Case("head-128, one head, block 48", SESSIONS[:3], head_size=128, num_kv_heads=1, block_size=48),
    Case("head-256", SESSIONS[:3], head_size=256, num_kv_heads=1),
    Case("HND", SESSIONS, layout="HND"),
    Case("HND gpt-j", SESSIONS, layout="HND", is_neox=False),
    Case("linear scaling", SESSIONS, factor=8.0, theta=1e6),
    Case("many layers", ((1, 100),), num_layers=7, head_size=32, num_kv_heads=1),
)

# Named before tuning: Qwen2.5-7B's keys, 64 sessions that each move a window of 1,024 tokens.
PRIMARY = Case(
    "28 layers x 4 heads of 128, 64 sessions x 64 blocks",
    tuple((64, 256 + 16 * i) for i in range(64)),
    num_layers=28,
    num_kv_heads=4,
    head_size=128,
    theta=1e6,
)


def build(case: Case, seed: int = 0, device: str = "cpu") -> Batch:
    """Random keys in shuffled blocks that are to be moved; NaN in all others, and in some of their slots, as
    behind a session's last token."""
    rng = torch.Generator(device=device).manual_seed(seed)
    num_moved = sum(count for count, _ in case.moves)
    num_blocks = num_moved + 3
    inner = (
        (case.block_size, case.num_kv_heads) if case.layout == "NHD" else (case.num_kv_heads, case.block_size)
    )
    shape = (case.num_layers, num_blocks, *inner, 2 * case.head_size)
    buffer = torch.full(shape, float("nan"), dtype=case.dtype, device=device)
    block_ids = torch.randperm(num_blocks, generator=rng, device=device)[:num_moved].tolist()
    keys = [layer if case.layout == "NHD" else layer.transpose(1, 2) for layer in buffer]
    keys = [layer[..., : case.head_size] for layer in keys]
    for layer in keys:
        data = torch.randn((num_moved, *layer.shape[1:]), generator=rng, device=device)
        data *= torch.where(torch.rand(data.shape, generator=rng, device=device) < 0.01, 400.0, 1.0)
        # As bytes, because indexing fp8 is not implemented everywhere.
        layer.view(torch.uint8)[block_ids] = rounded(data, case.dtype).view(torch.uint8)
        layer[block_ids[-1], case.block_size // 2 :] = float("nan")
    distances = [distance for count, distance in case.moves for _ in range(count)]
    return Batch(buffer, keys, block_ids, distances)
