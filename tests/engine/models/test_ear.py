"""Ear: which passes of the recogniser are due, in bounded memory."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.models.ear import CUT_WITHIN, MAX_SEGMENT, Ear, Pass, quietest

RATE = 16_000


def talk(seconds: float, level: float = 0.1) -> np.ndarray:
    return (np.random.default_rng(0).standard_normal(int(seconds * RATE)) * level).astype(np.float32)


def kinds(ear: Ear, audio: np.ndarray, is_final: bool = False) -> list[Pass]:
    due = [kind for kind, _ in ear.take(audio, is_final)]
    for kind in due:
        ear.heard(kind, ())
    return due


def test_a_pass_needs_enough_new_audio() -> None:
    ear = Ear()
    assert kinds(ear, talk(1.0)) == []
    assert kinds(ear, talk(1.0)) == [Pass.PARTIAL]
    assert kinds(ear, talk(1.0)) == []
    assert kinds(ear, talk(1.0)) == [Pass.PARTIAL]
    assert kinds(ear, talk(0.1), is_final=True) == [Pass.FINAL]


def test_a_pass_that_was_left_out_is_due_again() -> None:
    ear = Ear()
    assert [kind for kind, _ in ear.take(talk(2.0), False)] == [Pass.PARTIAL]
    assert kinds(ear, talk(0.1)) == [Pass.PARTIAL]
    assert kinds(ear, talk(0.1)) == []


def test_a_long_segment_needs_more() -> None:
    ear = Ear()
    kinds(ear, talk(14))
    assert [kinds(ear, talk(2)) for _ in range(4)] == [[], [Pass.PARTIAL], [], [Pass.PARTIAL]]


def test_a_quiet_room_needs_none_until_the_end() -> None:
    ear = Ear()
    assert kinds(ear, talk(10, level=0.001)) == []
    assert kinds(ear, talk(0), is_final=True) == [Pass.FINAL]


def test_a_pass_has_the_whole_segment() -> None:
    ear, parts = Ear(), [talk(2, level) for level in (0.05, 0.1, 0.15)]
    for part in parts[:2]:
        ear.take(part, False)
    [(kind, audio)] = ear.take(parts[2], True)
    assert kind is Pass.FINAL
    np.testing.assert_array_equal(audio, np.concatenate(parts))


def test_a_full_segment_is_cut_at_a_pause() -> None:
    ear = Ear()
    audio = talk(30)
    pause = MAX_SEGMENT - 2 * RATE
    audio[pause : pause + RATE // 2] = 0
    [(first, one), (second, two)] = ear.take(audio, False)
    assert (first, second) == (Pass.SEGMENT, Pass.PARTIAL)
    assert pause < len(one) < pause + RATE // 2
    np.testing.assert_array_equal(np.concatenate([one, two]), audio)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40 * RATE), st.booleans()), max_size=6))
def test_no_sample_is_lost_and_memory_is_bounded(chunks: list[tuple[int, bool]]) -> None:
    ear, fed, passed = Ear(), 0, 0
    for size, is_final in chunks:
        fed += size
        due = ear.take(np.full(size, 0.1, np.float32), is_final)
        assert all(len(audio) <= MAX_SEGMENT for _, audio in due)
        passed += sum(len(audio) for kind, audio in due if kind is not Pass.PARTIAL)
        if is_final:
            ear.reset()
            assert passed == fed
        assert passed + len(ear.audio) == fed
        assert len(ear.audio) <= MAX_SEGMENT


def test_a_segment_begins_without_the_words_of_the_one_before() -> None:
    """Also where the recogniser failed on its end and heard nothing."""
    ear = Ear()
    for words in (("one", "two", "three"), ("one", "two", "three")):
        ear.heard(Pass.PARTIAL, words)
    assert ear.heard(Pass.SEGMENT, ()) == []
    assert ear.heard(Pass.FINAL, ("two", "four")) == ["two", "four"]


def test_bad_samples_become_good_ones() -> None:
    ear = Ear()
    [(_, audio)] = ear.take(np.array([np.nan, np.inf, -np.inf, 7.0, 0.5], np.float32), True)
    assert np.isfinite(audio).all()
    assert np.abs(audio).max() <= 1.0


def test_quietest_looks_at_the_end_only() -> None:
    audio = np.ones(20 * RATE, np.float32)
    audio[: 5 * RATE] = 0
    assert quietest(audio) > len(audio) - CUT_WITHIN
    audio[17 * RATE : 18 * RATE] = 0
    assert 17 * RATE < quietest(audio) < 18 * RATE
