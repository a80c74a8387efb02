"""Works longer than one turn in vLLM may be: taken in piece by piece.

Between two turns a session can be compacted, inside one it cannot; so turns are kept short (compaction/).
A work does not notice: its pieces are turns in a row, of which only the last one's tokens are reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine.types import Work


def cut(work: Work, max_turn_tokens: int | None) -> Iterator[Work]:
    """`work` as works of at most `max_turn_tokens` each, never through an item with features.

    The first carries its `keep_tokens`; the last its `max_tokens`, which may be more than fit into that turn
    (see `answer_room`); those between decode nothing. None: one piece.
    """
    if max_turn_tokens is None or len(work.token_ids) <= max_turn_tokens:
        yield work
        return
    start, total = 0, len(work.token_ids)
    while start < total:
        end = min(start + max_turn_tokens, total)
        for item in work.features:
            if item.offset < end < item.offset + item.num_tokens:
                end = item.offset
        yield replace(
            work,
            token_ids=work.token_ids[start:end],
            features=tuple(
                replace(f, offset=f.offset - start) for f in work.features if start <= f.offset < end
            ),
            keep_tokens=work.keep_tokens if start == 0 else None,
            max_tokens=work.max_tokens if end == total else 0,
        )
        start = end


def answer_room(piece: Work, max_turn_tokens: int | None) -> int:
    """How many of the piece's `max_tokens` its turn may decode: the last one stays outside the KV cache."""
    if max_turn_tokens is None:
        return piece.max_tokens
    return min(piece.max_tokens, max_turn_tokens - len(piece.token_ids) + 1)
