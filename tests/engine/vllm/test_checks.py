"""The checks before vLLM, one rule at a time and without it."""

from __future__ import annotations

import pytest

from engine.types import Features, Work
from engine.vllm.checks import Bounds, unfit

BOUNDS = Bounds(vocab_size=100, max_session_tokens=50, max_item_tokens=8)


def work(num_tokens: int = 10, max_tokens: int = 0, features: tuple[Features, ...] = ()) -> Work:
    return Work("s", 0, 0, tuple(range(num_tokens)), features=features, max_tokens=max_tokens)


def item(offset: int, num_tokens: int) -> Features:
    return Features(offset, num_tokens, {"mel": object()})


@pytest.mark.parametrize("held,come,decode", [(0, 50, 0), (0, 49, 1), (40, 10, 0), (49, 1, 0), (30, 10, 10)])
def test_a_session_may_grow_to_its_limit(held, come, decode):
    assert unfit(work(come, decode), held, BOUNDS) is None


@pytest.mark.parametrize("held,come,decode", [(0, 51, 0), (0, 50, 1), (41, 10, 0), (50, 1, 0), (30, 10, 11)])
def test_a_session_may_not_grow_beyond_it(held, come, decode):
    reason = unfit(work(come, decode), held, BOUNDS)
    assert reason == (
        f"The session would grow beyond 50 tokens: {held} are held, {come} come in, {decode} may be decoded."
    )


@pytest.mark.parametrize("token", [-1, 100, 1 << 40])
def test_tokens_must_be_in_the_vocabulary(token):
    reason = unfit(Work("s", 0, 0, (1, token)), 0, BOUNDS)
    assert reason == "A token id lies outside the model's vocabulary of 100."


@pytest.mark.parametrize("features", [(), (item(0, 8),), (item(0, 1), item(1, 1), item(9, 1)), (item(2, 8),)])
def test_items_inside_the_tokens_fit(features):
    assert unfit(work(features=features), 0, BOUNDS) is None


@pytest.mark.parametrize(
    "features,reason",
    [
        ((item(0, 9),), "An item has 9 tokens; the encoder takes 1 to 8."),
        ((item(0, 0),), "An item has 0 tokens; the encoder takes 1 to 8."),
        ((item(3, 8),), "An item ends at token 11 of 10."),
        ((item(-1, 2),), "The items are not in order, or overlap."),
        ((item(0, 4), item(3, 4)), "The items are not in order, or overlap."),
        ((Features(0, 4, {}),), "An item has no tensors."),
    ],
)
def test_items_that_do_not_fit(features, reason):
    assert unfit(work(features=features), 0, BOUNDS) == reason


def test_a_text_model_takes_no_items():
    assert unfit(work(features=(item(0, 4),)), 0, Bounds(100, 50, 0)) == "This model takes no features."
