"""Where an answer is cut for speaking."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.voice.clauses import FIRST_MAX_CHARS, MAX_CHARS, ClauseCutter


def cut(text: str, size: int = 3) -> list[str]:
    """Fed in small pieces, as tokens come."""
    cutter, clauses = ClauseCutter(), []
    for start in range(0, len(text), size):
        clauses += cutter.push(text[start : start + size])
    return clauses + cutter.flush()


@pytest.mark.parametrize(
    "text",
    [
        "Sure,| the capital of Italy is Rome.| It lies, as you know, on both banks of the Tiber,| a river.",
        "Dr. Smith paid $1,234.56 at 3:30 p.m. in the afternoon.| Nobody knew why.",
        "It costs about 1,000 e.g. for No. 5,| as J. Austen and Mr. Darcy both said.",
        "Really?!| Yes.",
        '"Go away!"| said the fox.| And so the small grey owl went away,| far away.',
        "One thing:|\n1. Do this and that with great care.|\n2. Then do that.",
        "Wait...| what was it that you wanted to know about the old forest?| Tell me.",
    ],
)
def test_cuts_are_where_people_pause(text: str):
    assert cut(text.replace("|", "")) == text.split("|")


def test_the_first_clause_comes_as_soon_as_its_pause_is_certain():
    cutter = ClauseCutter()
    assert cutter.push("Sure,") == []  # it may be "Sure,it"
    assert cutter.push(" I") == ["Sure,"]


def test_text_without_a_pause_is_cut_between_words():
    clauses = cut("word " * 100)
    assert len(clauses) > 2 and all(clause.strip().split(" ")[0] == "word" for clause in clauses)


@given(
    st.text(st.characters(codec="utf-8"), max_size=600) | st.text('ab .,!\n1"', max_size=600),
    st.integers(1, 50),
)
def test_nothing_is_lost_and_nothing_is_too_long(text: str, size: int):
    clauses = cut(text, size)
    assert "".join(clauses) == text
    assert all(0 < len(clause) <= MAX_CHARS for clause in clauses)
    assert not clauses or len(clauses[0]) <= FIRST_MAX_CHARS
