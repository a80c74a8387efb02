"""Commands on their way to the engine's thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from engine.types import Result, Work

Key = tuple[str, int]  # session id, generation


@dataclass(slots=True)
class Letter:
    """What was asked for one generation of a session since the thread last looked."""

    key: Key
    work: Work | None = None
    surplus: Work | None = None  # a second work: against the contract, to be refused
    cancel_running: bool = False  # a cancel that came before `work`, for what ran then
    cancel_work: bool = False  # a cancel that came after it
    end: bool = False


class Inbox:
    """Any thread writes, one reads.

    Bounded by merging: one letter per session generation, whatever is asked of it how often while the
    engine is inside a step. An open session has one work unfinished at most; what it asks beyond that
    (cancelling on every click, a second work) changes its letter and adds none.
    """

    def __init__(self) -> None:
        self._letters: dict[Key, Letter] = {}
        self._wake = threading.Condition()
        self._closed = False

    def submit(self, batch: Sequence[Work]) -> None:
        with self._wake:
            for work in batch:
                letter = self._letter((work.session_id, work.generation))
                if letter.work is None:
                    letter.work = work
                else:
                    letter.surplus = work
            self._wake.notify()

    def cancel(self, key: Key) -> None:
        with self._wake:
            letter = self._letter(key)
            if letter.work is None:
                letter.cancel_running = True
            else:
                letter.cancel_work = True
            self._wake.notify()

    def end(self, key: Key) -> None:
        with self._wake:
            letter = self._letter(key)
            letter.end, letter.work, letter.surplus = True, None, None
            self._wake.notify()

    def without_ended(self, results: Sequence[Result]) -> list[Result]:
        """Drop what belongs to sessions that were ended while the results were computed."""
        with self._wake:
            ended = {key for key, letter in self._letters.items() if letter.end}
        return [r for r in results if (r.session_id, r.generation) not in ended]

    def close(self) -> None:
        """Wake the reader for the last time: `take` returns None from now on."""
        with self._wake:
            self._closed = True
            self._letters.clear()
            self._wake.notify()

    def take(self, *, block: bool) -> list[Letter] | None:
        """All letters, oldest first; waits for one if `block`. None once closed."""
        with self._wake:
            while block and not self._letters and not self._closed:
                self._wake.wait()
            if self._closed:
                return None
            letters, self._letters = list(self._letters.values()), {}
            return letters

    def _letter(self, key: Key) -> Letter:
        if self._closed:
            return Letter(key)  # nobody reads it
        return self._letters.setdefault(key, Letter(key))
