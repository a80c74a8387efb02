"""The sink ablation of bench.compaction_quality, with the exact mask of the CUDA kernel, in transformers.

The engine's CPU path rounds S up to a block, so there S = 1, 4 and 16 are one and the same. Here query t sees
[0, S) and [t - W + 1, t] and not a key more. Attention looks at differences of positions only, so a session
that was compacted is one whose sinks went forward by what was cut out: they are turned in float32 and rounded
to bf16, on the engine's schedule, and all other keys stay where they are.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from bench.window_quality import load, losses
from kernels.rebase import Rotation, rotate_back, turn_table
from kernels.sink_window.reference import visible_mask

BLOCK, CHUNK = 16, 256  # the engine's blocks, and tokens between two chances to compact


class CompactedView(NamedTuple):
    window: int
    num_sinks: int
    slack: int
    rotation: Rotation


def evicted_at(begin: int, evicted: int, view: CompactedView) -> int:
    """Tokens cut out of a session that has `begin` tokens, of which `evicted` were cut out before."""
    freed = max(0, begin - view.window + 1) // BLOCK * BLOCK - -(-view.num_sinks // BLOCK) * BLOCK
    return freed if freed - evicted >= view.slack else evicted


def compacted_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    view: CompactedView,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """One layer's attention, [1, heads, tokens, head_size], chunk by chunk; transformers' interface."""
    outs, evicted = [], 0
    for begin in range(0, query.shape[2], CHUNK):
        end = min(begin + CHUNK, query.shape[2])
        evicted = evicted_at(begin, evicted, view)
        first = max(0, begin - view.window + 1)
        sinks = min(view.num_sinks, first)
        turns = torch.from_numpy(turn_table(np.array([-evicted]), view.rotation))
        nearer = rotate_back(key[:, :, :sinks], turns, view.rotation).to(key.dtype)
        keys = torch.cat((nearer, key[:, :, first:end]), dim=2)
        values = torch.cat((value[:, :, :sinks], value[:, :, first:end]), dim=2)
        positions = torch.cat((torch.arange(sinks), torch.arange(first, end)))
        mask = visible_mask(torch.arange(begin, end), positions, view.num_sinks, view.window)
        outs.append(
            functional.scaled_dot_product_attention(
                query[:, :, begin:end], keys, values, attn_mask=mask, scale=scaling, enable_gqa=True
            )
        )
    return torch.cat(outs, dim=2).transpose(1, 2).contiguous(), None


def measure(
    directory: Path,
    tokens: list[int],
    sinks: tuple[int, ...],
    sizes: dict[str, int],
    path: Path,
    result: dict[str, Any],
) -> None:
    """Losses of one pass per S, written to `path` as each ends."""
    runs = result.setdefault("sinks", sizes | {"num_tokens": len(tokens) - 1, "runs": {}})["runs"]
    missing = [number for number in sinks if f"S={number}" not in runs]
    if not missing:
        return
    from transformers import AttentionInterface

    AttentionInterface.register("compacted", compacted_attention)
    model = load(directory, "compacted", torch.bfloat16)
    rotation = Rotation(model.model.rotary_emb.inv_freq.double(), True)
    for number in missing:
        begin = time.perf_counter()
        view: Any = CompactedView(sizes["window_tokens"], number, sizes["slack_tokens"], rotation)
        nll = losses(model, tokens, view).clone()
        runs[f"S={number}"] = [round(float(part.mean()), 5) for part in nll.split(sizes["bucket_tokens"])]
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(
            f"exact S={number}: {float(nll.mean().exp()):.2f}, {time.perf_counter() - begin:.0f} s",
            flush=True,
        )
