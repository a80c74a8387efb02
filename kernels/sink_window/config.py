"""How a launch of the sink-window kernels is cut, and the scratch memory of its decodes."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Config:
    """How the work is cut. A row's bits depend on these and on its own sequence, never on its batch."""

    num_splits: int  # programs that share the visible keys of a decode, per KV head
    decode_tile: int  # keys per step, a power of two
    block_m: int  # rows (pairs of a query and a head of its group) per mixed program
    mixed_tile: int
    mixed_warps: int = 4
    mixed_stages: int = 3
    decode_warps: int = 4
    decode_stages: int = 3
    split_align: int = 32  # a split is a multiple of so many keys
    split_decodes: bool = True  # False: mixed_kernel takes sequences of one query too
    stock_rounding: bool = False  # True: mixed_kernel rounds in the order of vLLM's stock kernel


@dataclass(frozen=True)
class Scratch:
    """Partial results of split decodes, reused by every launch of one stream: all layers share one.

    Allocate it once, outside of CUDA graph capture. `arrived` is zero between launches.
    """

    partial: torch.Tensor  # [max_num_seqs, num_heads, num_splits, head_size] float32
    partial_max: torch.Tensor  # [max_num_seqs, num_heads, num_splits] float32
    partial_sum: torch.Tensor  # [max_num_seqs, num_heads, num_splits] float32
    arrived: torch.Tensor  # [max_num_seqs, num_kv_heads] int32

    @classmethod
    def allocate(
        cls,
        max_num_seqs: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        window: int | None,
        device: torch.device | str,
        splits: int | None = None,
    ) -> Scratch:
        """Scratch for batches of up to `max_num_seqs` sequences with this window (tokens; None: unlimited).

        `splits` overrides the number of splits, for a Config that does.
        """
        rows = (max_num_seqs, num_heads, splits or num_splits(window))
        return cls(
            torch.empty((*rows, head_size), dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.zeros((max_num_seqs, num_kv_heads), dtype=torch.int32, device=device),
        )


def num_splits(window: int | None) -> int:
    """Splits of one decode: a function of W alone, so that a row's bits never depend on its batch."""
    return min(16, -(-window // 256)) if window else 16


def default_config(head_size: int, window: int | None) -> Config:
    """The configuration measured best on an H200 (bench/results/sink_window.md)."""
    wide = head_size > 128
    return Config(
        num_splits=num_splits(window),
        decode_tile=64 if head_size == 64 else 32,
        block_m=128 if wide else 64,
        mixed_tile=32 if wide else 64,
        mixed_warps=8 if wide else 4,
    )
