"""Hugging Face's model as a session that is compacted like ours: same tokens, same cuts, its own code.

It keeps the keys and values of every resident token, masks by hand, and turns keys by the textbook's formula
in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch


class JudgedSession:
    """One session. `slack` None: never compacted, positions are kept and the gap is only masked.

    `exact`: the CUDA kernel's mask instead of the CPU's, which rounds to blocks and a step's first query.
    """

    def __init__(
        self,
        model: Any,
        num_sink_tokens: int,
        window: int,
        block_size: int,
        slack: int | None,
        exact: bool = False,
    ) -> None:
        from transformers import DynamicCache

        self._model, self._cache = model, cast(Any, DynamicCache())
        self._sinks, self._exact = num_sink_tokens, exact
        self._first = -(-num_sink_tokens // block_size) * block_size
        self._window, self._block_size, self._slack = window, block_size, slack
        self.length = 0  # resident
        self.num_evicted = 0
        self.num_compactions = 0

    @torch.inference_mode()
    def feed(self, tokens: Sequence[int], step_sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Logits [tokens, vocabulary] of one turn's tokens, computed in steps of these sizes."""
        gap = self._seen_from() - self._first
        if self._slack is not None and gap >= max(self._slack, 1):
            self._cut(gap)
        logits = []
        for size in step_sizes or [len(tokens)]:
            logits.append(self._step(tokens[:size]))
            tokens = tokens[size:]
        assert not tokens
        return torch.cat(logits)

    def forget(self, keep_tokens: int) -> None:
        """Go back to the first `keep_tokens`, evicted ones counted; a gap is closed."""
        gap = max(0, self._seen_from() - self._first)
        self._cache.crop(keep_tokens - self.num_evicted)
        self.length = keep_tokens - self.num_evicted
        if gap and self._slack is not None:
            self._cut(gap)

    def _seen_from(self) -> int:
        """Where the window of the next step's first query begins, rounded to its block."""
        return max(0, self.length - self._window + 1) // self._block_size * self._block_size

    def _step(self, tokens: Sequence[int]) -> torch.Tensor:
        size, total = len(tokens), self.length + len(tokens)
        mask = torch.full((size, total), True).tril(self.length)
        if self._exact:
            mask &= torch.full((size, total), True).triu(self.length - self._window + 1)
            mask[:, : self._sinks] |= torch.full((size, total), True).tril(self.length)[:, : self._sinks]
        else:
            mask[:, self._first : max(self._first, self._seen_from())] = False
        device = self._model.device
        out = self._model(
            torch.tensor([tokens], device=device),
            attention_mask=_additive(mask).to(device),
            position_ids=torch.arange(self.length, total, device=device)[None],
            past_key_values=self._cache,
            use_cache=True,
        )
        self.length = total
        return out.logits[0]

    def _cut(self, distance: int) -> None:
        for layer in self._cache.layers:
            layer.keys = _without(layer.keys, self._first, distance)
            layer.keys[:, :, self._first :] = self._turn_back(layer.keys[:, :, self._first :], distance)
            layer.values = _without(layer.values, self._first, distance)
        self.length -= distance
        self.num_evicted += distance
        self.num_compactions += 1

    def _turn_back(self, keys: torch.Tensor, distance: int) -> torch.Tensor:
        half = keys.shape[-1] // 2
        base = self._model.config.rope_parameters["rope_theta"]
        angle = -distance * base ** (-torch.arange(half, dtype=torch.float64, device=keys.device) / half)
        first, second = keys.double().split(half, dim=-1)
        turned = [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()]
        return torch.cat(turned, dim=-1).to(keys.dtype)


def _additive(mask: torch.Tensor) -> torch.Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[None, None]


def _without(cached: torch.Tensor, start: int, length: int) -> torch.Tensor:
    return torch.cat([cached[:, :, :start], cached[:, :, start + length :]], dim=2)
