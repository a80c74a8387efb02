"""How much was played, and which words that is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.voice.playback import REPORT_LIFE_S, Playback, whole_words
from engine.voice.voice import VOICE_RATE


def add(playback: Playback, text: str, num_samples: int, now: float) -> None:
    """A clause whose sound is sent at once."""
    playback.begin(text, num_samples)
    if num_samples:
        playback.sent(num_samples, now)


def make(now: float = 10.0) -> Playback:
    """Two clauses of a second each."""
    playback = Playback(starts_at=now)
    add(playback, "one two three", VOICE_RATE, now)
    add(playback, " four five", VOICE_RATE, now)
    return playback


def test_without_reports_sound_is_played_from_when_it_was_sent():
    playback = make()
    assert playback.played(10.0) == 0 and playback.ahead_s(10.0) == 2.0
    assert playback.played(10.5) == VOICE_RATE // 2
    assert playback.played(99.0) == 2 * VOICE_RATE
    add(playback, " six", VOICE_RATE, 20.0)  # after a dry spell
    assert playback.played(20.5) == 2 * VOICE_RATE + VOICE_RATE // 2


def test_a_report_counts_and_goes_on_with_time_until_it_is_old():
    playback = make()
    playback.report(100, 11.0)  # the client began late
    assert playback.played(11.0) == VOICE_RATE // 10
    assert playback.played(11.5) == round(0.6 * VOICE_RATE)
    assert playback.played(11.0 + REPORT_LIFE_S) == 2 * VOICE_RATE  # by the time since it was sent


def test_after_a_flush_only_reports_say_more():
    playback = make()
    playback.report(200, 10.4)
    playback.flush(10.5)
    assert playback.played(50.0) == round(0.3 * VOICE_RATE)
    playback.report(250, 10.6)
    assert playback.played(50.0) == VOICE_RATE // 4
    assert playback.heard_chars(50.0) == len("one")
    playback.report(700, 10.7)
    assert playback.heard_chars(50.0) == len("one two")


def test_whole_clauses_count_whole_and_empty_ones_with_the_one_before():
    playback = Playback(0.0)
    add(playback, "Well,", 0, 0.0)  # the voice had nothing to say for it
    add(playback, " yes.", VOICE_RATE, 0.0)
    add(playback, " :-)", 0, 0.0)
    assert playback.heard_chars(0.0) == len("Well,")
    assert playback.heard_chars(1.0) == len("Well, yes. :-)")


def test_of_a_clause_that_was_sent_in_part_no_more_was_heard():
    playback = Playback(0.0)
    playback.begin("one two three four", 4 * VOICE_RATE)
    playback.sent(2 * VOICE_RATE, 0.0)
    assert playback.ahead_s(0.0) == 2.0
    playback.report(4000, 9.0)
    assert playback.played(9.0) == 2 * VOICE_RATE
    assert playback.heard_chars(9.0) == len("one two")


def test_words_are_whole():
    assert whole_words("one two three", 0.99) == len("one two")
    assert whole_words("one two three", 0.55) == len("one two")  # exactly at its end
    assert whole_words("one two three", 1.0) == len("one two three")
    assert whole_words(" one", 0.3) == 0


@given(
    st.lists(st.tuples(st.text("ab ,.", max_size=20), st.integers(0, 50_000)), max_size=6),
    st.lists(st.tuples(st.integers(0, 20_000), st.floats(0.0, 3.0)), max_size=8),
    st.floats(0.0, 30.0),
)
def test_played_never_goes_back_before_a_flush_and_stays_within_what_was_sent(clauses, reports, flush_after):
    playback, now = Playback(0.0), 0.0
    for text, num_samples in clauses:
        add(playback, text, num_samples, now)
    for played_ms, wait_s in reports:
        playback.report(played_ms, now)
        now += wait_s
        assert 0 <= playback.played(now) <= playback.num_samples
        assert 0 <= playback.heard_chars(now) <= sum(len(text) for text, _ in clauses)
    playback.flush(now + flush_after)
    at_flush = playback.played(now + flush_after)
    assert playback.played(now + flush_after + 100) == at_flush
