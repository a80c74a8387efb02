"""Long works, cut into turns."""

from __future__ import annotations

import random

import pytest

from engine.types import Features, Work
from engine.vllm.pieces import answer_room, cut


def work(num_tokens: int, max_tokens: int = 0, features: tuple[Features, ...] = (), keep: int | None = None):
    tokens = tuple(range(num_tokens))
    return Work("a", 0, 1, tokens, features=features, keep_tokens=keep, max_tokens=max_tokens)


def test_a_short_work_and_an_engine_without_turns_leave_a_work_whole():
    whole = work(8, 100)
    assert list(cut(whole, 8)) == list(cut(work(8, 100), None)) == [whole]


@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_the_work_in_order_and_never_cut_an_item(seed: int):
    rng = random.Random(seed)
    limit, items, at = rng.randint(4, 30), [], 0
    for _ in range(rng.randint(0, 8)):
        at += rng.randint(0, 12)
        size = rng.randint(1, limit)
        items.append(Features(at, size, {"at": at}))
        at += size
    whole = work(at + rng.randint(1, 40), 7, tuple(items), keep=3)
    pieces = list(cut(whole, limit))
    assert [t for piece in pieces for t in piece.token_ids] == list(whole.token_ids)
    assert all(1 <= len(piece.token_ids) <= limit for piece in pieces)
    found = [(piece.token_ids[f.offset], f.num_tokens) for piece in pieces for f in piece.features]
    assert found == [(item.offset, item.num_tokens) for item in items]
    assert all(f.offset + f.num_tokens <= len(piece.token_ids) for piece in pieces for f in piece.features)
    assert [piece.keep_tokens for piece in pieces] == [3] + [None] * (len(pieces) - 1)
    assert [piece.max_tokens for piece in pieces] == [0] * (len(pieces) - 1) + [7]


@pytest.mark.parametrize("num_tokens,max_tokens,room", [(10, 0, 0), (10, 5, 5), (28, 5, 3), (30, 5, 1)])
def test_a_turn_computes_no_more_than_it_may(num_tokens: int, max_tokens: int, room: int):
    assert answer_room(work(num_tokens, max_tokens), 30) == room
    assert num_tokens + max(room - 1, 0) <= 30
    assert answer_room(work(num_tokens, max_tokens), None) == max_tokens
