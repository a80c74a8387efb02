"""LocalAgreement-2: what two transcripts agree on is committed, once and for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.models.stable_prefix import StablePrefix

transcripts = st.lists(st.lists(st.sampled_from(["a", "b", "c", "A.", "b,"]), max_size=8), max_size=6)


def test_commits_what_two_agree_on_but_not_the_last_word() -> None:
    stable = StablePrefix()
    assert stable.update("And so my".split()) == []
    assert stable.update("And so my fellow".split()) == ["And", "so", "my"]
    assert stable.update("And so my fellow Americans".split()) == ["fellow"]
    assert stable.finish("And so my fellow Americans ask not.".split()) == ["Americans", "ask", "not."]
    assert stable.committed == "And so my fellow Americans ask not.".split()


def test_disagreement_commits_nothing() -> None:
    stable = StablePrefix()
    stable.update("I scream for it".split())
    assert stable.update("Ice cream for it".split()) == []
    assert stable.update("Ice cream for it all".split()) == ["Ice", "cream", "for", "it"]


def test_case_and_punctuation_do_not_disagree() -> None:
    stable = StablePrefix()
    stable.update("hello. how are".split())
    assert stable.update("Hello, how are you".split()) == ["Hello,", "how", "are"]
    assert stable.finish("hello how are you".split()) == ["you"]


def test_a_later_transcript_that_spells_the_committed_words_otherwise() -> None:
    """What was committed stays; only what stands behind it is added, neither lost nor doubled."""
    stable = StablePrefix()
    stable.update("the ice cream is good".split())
    stable.update("the ice cream is good and".split())
    assert stable.committed == "the ice cream is good".split()
    assert stable.finish("the icecream is good and cheap".split()) == ["and", "cheap"]
    stable = StablePrefix()
    stable.update("one two three four".split())
    stable.update("one two three four".split())
    assert stable.finish("well one two three four five".split()) == ["four", "five"]


def test_a_shorter_transcript_takes_nothing_back() -> None:
    stable = StablePrefix()
    stable.update("one two three four".split())
    stable.update("one two three four".split())
    assert stable.update([]) == []
    assert stable.finish(["one"]) == []
    assert stable.committed == ["one", "two", "three"]


@given(transcripts, st.lists(st.sampled_from(["a", "b", "c"]), max_size=8))
def test_committed_words_only_grow(partials: list[list[str]], last: list[str]) -> None:
    stable, given_out = StablePrefix(), []
    for words in partials:
        given_out += stable.update(words)
        assert stable.committed == given_out
    given_out += stable.finish(last)
    assert stable.committed == given_out


@given(
    st.lists(st.text("abcdefgh", min_size=1, max_size=3), max_size=12),
    st.lists(st.integers(0, 12), max_size=6),
)
def test_a_recogniser_that_never_errs_loses_and_doubles_nothing(words: list[str], ends: list[int]) -> None:
    stable = StablePrefix()
    for end in sorted(ends):
        stable.update(words[:end])
    stable.finish(words)
    assert len(stable.committed) == len(words) or len(set(words)) < len(words)
    if len(set(words)) == len(words):
        assert stable.committed == words
