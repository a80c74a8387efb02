"""Where an answer is cut for speaking: at natural pauses, so that sound begins before the text is done."""

from __future__ import annotations

import re

FIRST_MIN_CHARS = 4  # the first clause is short, so that the voice starts early
FIRST_MAX_CHARS = 80
MIN_CHARS = 32  # at a comma; a clause too short has no melody
MIN_SENTENCE_CHARS = 12
MAX_CHARS = 200  # without a pause for so long, it is cut between words

_CLOSING = "\"')]\N{RIGHT DOUBLE QUOTATION MARK}\N{RIGHT SINGLE QUOTATION MARK}"
_OPENING = "\"'([\N{LEFT DOUBLE QUOTATION MARK}\N{LEFT SINGLE QUOTATION MARK}"
_COMMAS = ",;:\N{EM DASH}\N{EN DASH}"
_PAUSE = re.compile(rf"([.!?…]+[{re.escape(_CLOSING)}]*|[{_COMMAS}][{re.escape(_CLOSING)}]?)(?=\s)|\n+")
_ABBREVIATIONS = frozenset(
    "mr mrs ms dr prof sr jr st vs etc e.g i.e eg ie no nos vol fig pp approx dept est inc ltd co corp "
    "jan feb mar apr jun jul aug sep sept oct nov dec u.s u.k a.m p.m".split()
)


class ClauseCutter:
    """Text goes in as it is written; whole clauses come out. Joined, they are the text again."""

    def __init__(self) -> None:
        self._text = ""  # not given out yet
        self._is_first = True

    def push(self, text: str) -> list[str]:
        """The clauses that are complete now."""
        self._text += text
        clauses: list[str] = []
        while (end := self._cut()) is not None:
            clauses.append(self._text[:end])
            self._text = self._text[end:]
            self._is_first = False
        return clauses

    def flush(self) -> list[str]:
        """The rest, when the text is over."""
        rest, self._text = self._text, ""
        return [rest] if rest else []

    def _cut(self) -> int | None:
        """Length of the next clause; None: more text must come first."""
        for match in _PAUSE.finditer(self._text):
            if match.end() > self._max_chars:
                break
            if match.end() >= self._min_chars(match.group()) and self._is_pause(match):
                return match.end()
        if len(self._text) <= self._max_chars:
            return None
        space = self._text.rfind(" ", 1, self._max_chars)
        return space if space > 0 else self._max_chars

    @property
    def _max_chars(self) -> int:
        return FIRST_MAX_CHARS if self._is_first else MAX_CHARS

    def _min_chars(self, mark: str) -> int:
        if self._is_first:
            return FIRST_MIN_CHARS
        return MIN_CHARS if mark[0] in _COMMAS else MIN_SENTENCE_CHARS

    def _is_pause(self, match: re.Match[str]) -> bool:
        """False where a dot belongs to the word before it: Dr. Smith, J. Austen, No. 5, 1. the first."""
        if match.group() != ".":
            return True
        word = self._text[: match.start()].rsplit(maxsplit=1)[-1:] or [""]
        last = word[0].lstrip(_OPENING).lower()
        return not (len(last) == 1 or last in _ABBREVIATIONS or last.isdigit())
