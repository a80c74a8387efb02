"""Whether a work can be run: the checks that stand before vLLM, where a bad request stops the engine.

vLLM meets an empty chunk, a session past its length or an unknown token id with an assertion or an index
error inside a step, and every session ends with it. So each is refused here, alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.types import Features, Work


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the started model accepts."""

    vocab_size: int
    max_session_tokens: int | None  # None: sessions have no end
    max_item_tokens: int  # placeholders of one item with features; 0: the model takes none
    max_head_tokens: int | None = None  # cap on S; None: everything is kept anyway


def unfit(work: Work, num_kv_tokens: int, bounds: Bounds) -> str | None:
    """Why `work` cannot follow the `num_kv_tokens` its session holds; None if it can."""
    if not work.token_ids:
        return "A work needs at least one token."
    if min(work.token_ids) < 0 or max(work.token_ids) >= bounds.vocab_size:
        return f"A token id lies outside the model's vocabulary of {bounds.vocab_size}."
    if work.max_tokens < 0:
        return f"max_tokens must not be negative, got {work.max_tokens}."
    limit = bounds.max_session_tokens
    if limit is not None and num_kv_tokens + len(work.token_ids) + work.max_tokens > limit:
        return (
            f"The session would grow beyond {limit} tokens: {num_kv_tokens} are held, "
            f"{len(work.token_ids)} come in, {work.max_tokens} may be decoded."
        )
    if work.num_head_tokens < 0:
        return f"num_head_tokens must not be negative, got {work.num_head_tokens}."
    if bounds.max_head_tokens is not None and work.num_head_tokens > bounds.max_head_tokens:
        return (
            f"The conversation's head (template and instructions) has {work.num_head_tokens} tokens; this "
            f"server keeps up to {bounds.max_head_tokens} for ever: shorten the instructions."
        )
    return _unfit_features(work.features, len(work.token_ids), bounds.max_item_tokens)


def _unfit_features(features: Sequence[Features], num_tokens: int, max_item_tokens: int) -> str | None:
    end = 0
    for item in features:
        if max_item_tokens == 0:
            return "This model takes no features."
        if not 0 < item.num_tokens <= max_item_tokens:
            return f"An item has {item.num_tokens} tokens; the encoder takes 1 to {max_item_tokens}."
        if item.offset < end:
            return "The items are not in order, or overlap."
        end = item.offset + item.num_tokens
        if end > num_tokens:
            return f"An item ends at token {end} of {num_tokens}."
        if not item.tensors:
            return "An item has no tensors."
    return None
