"""An answer is late only where its playback runs dry."""

from __future__ import annotations

from engine.answer import Answer
from engine.events import ResponseCreated, ResponseDone, ResponseTextDelta
from engine.models.null import NullDetokenizer, encode


def make(max_tokens: int = 100) -> Answer:
    return Answer("r1", NullDetokenizer(), max_tokens, tokens_per_s=4.0)


def test_tokens_ahead_of_playback_are_not_late():
    answer = make()
    answer.push(encode("eight by"), now=10.0)  # lasts until 12.0
    assert answer.take_lateness(11.9) == 0.0
    answer.push(encode("more"), now=11.9)  # until 13.0
    assert answer.take_lateness(13.0) == 0.0


def test_an_open_dry_spell_counts_as_its_age_and_a_past_one_as_its_length():
    answer = make()
    answer.push(encode("four"), now=10.0)  # lasts until 11.0
    assert answer.take_lateness(11.5) == 0.5
    answer.push(encode("four"), now=12.0)  # was dry for a second; lasts until 13.0
    assert answer.take_lateness(12.5) == 1.0
    assert answer.take_lateness(12.6) == 0.0


def test_nothing_is_late_before_the_first_token():
    assert make().take_lateness(99.0) == 0.0


def test_text_is_announced_once_and_split_characters_wait():
    answer = make()
    snow = "\N{SNOWMAN}".encode()
    events = answer.push(tuple(snow[:2]), 0.0) + answer.push(tuple(snow[2:]), 0.0) + answer.finish("stop")
    assert [type(e) for e in events] == [ResponseCreated, ResponseTextDelta, ResponseDone]
    assert events[1] == ResponseTextDelta(response_id="r1", delta="\N{SNOWMAN}")
    assert events[2] == ResponseDone(response_id="r1", reason="stop", tokens=3)


def test_what_was_cut_says_no_more_and_why():
    answer = make()
    answer.push(encode("hello"), 0.0)
    answer.cut = "interrupted"
    assert answer.push(encode(" there"), 0.0) == []
    assert answer.finish("stop") == [ResponseDone(response_id="r1", reason="interrupted", tokens=11)]


def test_silence_is_never_announced():
    assert make().finish("stop") == []
