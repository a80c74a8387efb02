"""The conversation as the model sees it: which template tokens go around what was heard, and what is owed.

Pure bookkeeping on token ids. Two facts of the engine shape it (engine/types.py, `Result`): the last token of
a work is not in the KV cache, and a stop token never is. What closes an answer is carried to the next work.
"""

from __future__ import annotations

from dataclasses import replace

from engine.models.family import Family
from engine.types import Features, Finish, Intake, TurnMode, Work


class Conversation:
    """Builds a session's works, in order. One at a time: build, then `settle` with its last result."""

    def __init__(self, session_id: str, family: Family, mode: TurnMode, instructions: str) -> None:
        self._session_id = session_id
        self._family = family
        self.mode = mode
        self.instructions = instructions
        self.generation = 0
        self._seq = 0
        self._head = family.head(instructions)
        self._owed: list[int] = list(self._head)  # tokens that must come before whatever is appended next
        self._is_turn_open = False  # the user's turn has tokens in it
        self._is_answer_open = False  # the answer has begun and is not closed
        self.has_spoken = False  # anything beyond the head was said
        self._stop_token: int | None = None  # with which the answer's last work stopped

    @property
    def is_turn_open(self) -> bool:
        return self._is_turn_open

    def open(self) -> Work:
        """Take in the head at once, so that the first turn need not wait for it."""
        return self._work((), (), max_tokens=0)

    def take_in(self, intake: Intake, *, is_final: bool, max_tokens: int) -> Work | None:
        """Append what was heard; when final, close the turn and decode up to `max_tokens`.

        None when there is nothing to append: nothing was said, or the turn that ends had no words.
        """
        if not intake.token_ids and not (is_final and self._is_turn_open):
            return None
        self.close_answer()  # continuous mode: an answer goes on as the next tick's answer
        template: tuple[int, ...] = () if self._is_turn_open else self._family.open_turn(self.mode)
        self._is_turn_open = not is_final
        self.has_spoken = True
        tail = self._family.close_turn(self.mode) if is_final else ()
        features = tuple(replace(f, offset=f.offset + len(template)) for f in intake.features)
        if is_final:
            self._is_answer_open = True
        return self._work(
            (*template, *intake.token_ids, *tail), features, max_tokens=max_tokens if is_final else 0
        )

    def go_on(self, max_tokens: int) -> Work:
        """Continue the open answer where the last work left it."""
        if not self._is_answer_open or not self._owed:
            raise RuntimeError("go_on: no answer was cut short")
        return self._work((), (), max_tokens=max_tokens)

    def settle(self, token_ids: tuple[int, ...], finish: Finish, stop_token: int | None = None) -> None:
        """The work ended with these decoded tokens (all of them, over all its results)."""
        self._stop_token = stop_token
        if token_ids and finish is not Finish.STOP:
            self._owed.append(token_ids[-1])

    def close_answer(self) -> None:
        """The answer is over, for whatever reason. No-op where none is open."""
        if self._is_answer_open:
            self._is_answer_open = False
            stop_token = self._stop_token
            if stop_token is None:
                self._owe(self._family.close_answer(self.mode))
            else:
                self._owe(self._family.close_stopped(self.mode, stop_token))

    def instruct(self, instructions: str) -> bool:
        """New instructions. True: nothing was said yet, so the head is replaced and a generation begins.

        Call between turns only.
        """
        self.instructions = instructions
        if self.has_spoken:
            self._owe(self._family.instruct(instructions))
            return False
        self.generation += 1
        self._head = self._family.head(instructions)
        self._owed = list(self._head)
        return True

    def _owe(self, token_ids: tuple[int, ...]) -> None:
        self._owed.extend(token_ids)

    def _work(self, tokens: tuple[int, ...], features: tuple[Features, ...], *, max_tokens: int) -> Work:
        prefix, self._owed = tuple(self._owed), []
        self._seq += 1
        return Work(
            session_id=self._session_id,
            generation=self.generation,
            seq=self._seq,
            token_ids=prefix + tokens,
            features=tuple(replace(f, offset=f.offset + len(prefix)) for f in features),
            num_head_tokens=len(self._head),
            max_tokens=max_tokens,
            sampling=self._family.sampling(),
        )
