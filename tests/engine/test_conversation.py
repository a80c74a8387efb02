"""Which tokens go around what was heard. The rule: the engine sees the whole template, each token once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.conversation import Conversation
from engine.models.null import CLOSE, END, OPEN, NullFamily, encode
from engine.types import Features, Finish, Intake, TurnMode, Work


@dataclass
class Cache:
    """The tokens an engine would hold: what works bring, and what is decoded but for the last token."""

    tokens: list[int]

    def run(self, work: Work, decoded: tuple[int, ...] = (), finish: Finish = Finish.FED) -> None:
        assert work.token_ids
        self.tokens += work.token_ids
        kept = decoded if finish is Finish.STOP else decoded[:-1]
        self.tokens += kept


def make(mode: TurnMode = TurnMode.MANUAL) -> tuple[Conversation, Cache]:
    conversation, cache = Conversation("s", NullFamily(), mode, "hi"), Cache([])
    cache.run(conversation.open())
    conversation.settle((), Finish.FED)
    return conversation, cache


HEAD = NullFamily().head("hi")


def take(conversation: Conversation, text: str, is_final: bool, max_tokens: int = 8) -> Work | None:
    return conversation.take_in(Intake(encode(text)), is_final=is_final, max_tokens=max_tokens)


def test_a_turn_in_pieces_an_answer_in_pieces_then_a_second_turn():
    conversation, cache = make()
    for text, is_final in (("how ", False), ("are you", True)):
        work = take(conversation, text, is_final)
        assert work is not None and work.num_head_tokens == len(HEAD)
        assert work.max_tokens == (8 if is_final else 0)
        if not is_final:
            cache.run(work)
            conversation.settle((), Finish.FED)
    cache.run(work, encode("fine, th"), Finish.LENGTH)
    conversation.settle(encode("fine, th"), Finish.LENGTH)
    more = conversation.go_on(8)
    assert more.token_ids == encode("h")  # the token that the engine had not kept
    cache.run(more, encode("anks"), Finish.STOP)
    conversation.settle(encode("anks"), Finish.STOP)
    conversation.close_answer()
    last = take(conversation, "good", True)
    assert last is not None
    cache.run(last)
    expected = (
        *HEAD,
        *(OPEN, *encode("how are you"), CLOSE, *encode("fine, thanks"), END),
        *(OPEN, *encode("good"), CLOSE),
    )
    assert tuple(cache.tokens) == expected


def test_nothing_said_makes_no_work_and_a_turn_with_only_early_words_is_closed():
    conversation, _ = make()
    assert conversation.take_in(Intake(), is_final=False, max_tokens=8) is None
    assert conversation.take_in(Intake(), is_final=True, max_tokens=8) is None
    take(conversation, "early", False)
    final = conversation.take_in(Intake(), is_final=True, max_tokens=8)
    assert final is not None and final.token_ids == (CLOSE,)


def test_features_keep_pointing_at_their_tokens():
    conversation, _ = make()
    work = take(conversation, "a", True)
    assert work is not None
    conversation.settle(encode("xy"), Finish.LENGTH)  # y is owed
    conversation.close_answer()
    features = (Features(1, 2, {}),)
    work = conversation.take_in(Intake(encode("abc"), features), is_final=True, max_tokens=4)
    assert work is not None
    (moved,) = work.features
    assert work.token_ids[moved.offset : moved.offset + moved.num_tokens] == encode("bc")


def test_new_instructions_replace_the_head_or_follow_the_turn():
    conversation, _ = make()
    assert conversation.instruct("be kind") and conversation.generation == 1
    assert conversation.open().token_ids == NullFamily().head("be kind")
    take(conversation, "x", True)
    conversation.close_answer()
    assert not conversation.instruct("be brief") and conversation.generation == 1
    work = take(conversation, "y", True)
    assert work is not None and work.token_ids == (
        END,
        *NullFamily().head("be brief"),
        OPEN,
        *encode("y"),
        CLOSE,
    )


def test_instructions_that_were_never_taken_in_are_replaced():
    """A client may change its mind as often as it likes: the next turn does not grow with it."""
    conversation, _ = make()
    take(conversation, "x", True)
    conversation.close_answer()
    for i in range(1000):
        conversation.instruct(f"be {i}")
    work = take(conversation, "y", True)
    assert work is not None
    assert work.token_ids == (END, *NullFamily().head("be 999"), OPEN, *encode("y"), CLOSE)


def test_going_on_without_a_cut_answer_is_our_bug():
    conversation, _ = make()
    with pytest.raises(RuntimeError, match="no answer was cut short"):
        conversation.go_on(8)


@given(
    st.lists(
        st.tuples(
            st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=3),
            st.lists(st.text("xyz", min_size=1, max_size=4), min_size=1, max_size=3),
            st.sampled_from([Finish.STOP, Finish.LENGTH, Finish.CANCELLED]),
        ),
        max_size=5,
    )
)
def test_the_cache_always_holds_the_conversation(turns):
    conversation, cache = make()
    expected = list(HEAD)
    for heard, answered, last_finish in turns:
        for i, text in enumerate(heard):
            work = take(conversation, text, i == len(heard) - 1)
            assert work is not None
            if i < len(heard) - 1:
                cache.run(work)
                conversation.settle((), Finish.FED)
        expected += [OPEN, *encode("".join(heard)), CLOSE]
        for i, text in enumerate(answered):
            finish = last_finish if i == len(answered) - 1 else Finish.LENGTH
            cache.run(work, encode(text), finish)
            conversation.settle(encode(text), finish)
            if i < len(answered) - 1:
                work = conversation.go_on(8)
        conversation.close_answer()
        expected += [*encode("".join(answered)), END]
    end = take(conversation, "q", True)
    assert end is not None
    cache.run(end)
    assert cache.tokens == [*expected, OPEN, *encode("q"), CLOSE]


class Pausing(NullFamily):
    """A model that says with its stop token whether it goes on."""

    def close_stopped(self, mode: TurnMode, stop_token: int) -> tuple[int, ...]:
        return (stop_token, *self.close_answer(mode))


def test_the_token_that_ended_the_answer_is_given_back_where_the_family_wants_it():
    conversation = Conversation("s", Pausing(), TurnMode.CONTINUOUS, "hi")
    conversation.open()
    conversation.settle((), Finish.FED)
    take(conversation, "one", True)
    conversation.settle(encode("yes"), Finish.STOP, 77)
    second = take(conversation, "two", True)
    assert second is not None and second.token_ids[:2] == (77, END)
    conversation.settle(encode("no"), Finish.LENGTH)
    third = take(conversation, "three", True)
    assert third is not None and third.token_ids[:2] == (*encode("o"), END)
