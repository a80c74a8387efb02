"""Which words of a growing recording's transcripts can be relied on: LocalAgreement-2.

A recogniser is run again and again on a longer recording of one turn. Words are committed once two
transcripts in a row agree on them (Macháček, Dabre, Bojar: "Turning Whisper into Real-Time Transcription
System", IJCNLP-AACL 2023 demos, section 2; after Liu et al. 2020). What is committed is never taken back, so
that it can be appended to a model's context at once.
"""

from __future__ import annotations

from collections.abc import Sequence

HELD_BACK_WORDS = 1
"""The last word of an unfinished recording may be cut off, and two transcripts can agree on half of it."""


class StablePrefix:
    """The words of one turn (or segment); as many as its recording has."""

    def __init__(self) -> None:
        self.committed: list[str] = []
        self._pending: list[str] = []  # the last transcript's words behind the committed ones

    def update(self, words: Sequence[str]) -> list[str]:
        """A transcript of the recording so far; the words that it newly commits."""
        rest = self._behind_committed(words)
        certain = rest[: max(len(rest) - HELD_BACK_WORDS, 0)]
        agreed = 0
        for old, new in zip(self._pending, certain, strict=False):
            if _plain(old) != _plain(new):
                break
            agreed += 1
        self.committed += rest[:agreed]
        self._pending = rest[agreed:]
        return rest[:agreed]

    def finish(self, words: Sequence[str]) -> list[str]:
        """The transcript of the whole recording; commits the rest of it."""
        rest = self._behind_committed(words)
        self.committed += rest
        self._pending = []
        return rest

    def _behind_committed(self, words: Sequence[str]) -> list[str]:
        """The words behind those that stand for the committed ones, however they are spelt now."""
        return list(words[_aligned(self.committed, words) :])


def _aligned(committed: Sequence[str], words: Sequence[str]) -> int:
    """How many of `words` stand for all of `committed`: the prefix at the least edit distance.

    Of several, the one nearest to `committed` in length.
    """
    want = [_plain(word) for word in committed]
    distances = [[0] * (len(words) + 1) for _ in range(len(want) + 1)]
    distances[0] = list(range(len(words) + 1))
    for i, expected in enumerate(want, start=1):
        distances[i][0] = i
        for j, word in enumerate(words, start=1):
            distances[i][j] = min(
                distances[i - 1][j] + 1,
                distances[i][j - 1] + 1,
                distances[i - 1][j - 1] + (expected != _plain(word)),
            )
    last = distances[-1]
    return min(range(len(words) + 1), key=lambda j: (last[j], abs(j - len(want))))


def _plain(word: str) -> str:
    """Case and punctuation change from one transcript to the next."""
    return "".join(c for c in word.casefold() if c.isalnum()) or word
