"""The conversation as the model sees it: which template tokens go around what was heard, and what is owed.

Pure bookkeeping on token ids. Two facts of the engine shape it (engine/types.py, `Result`): the last token of
a work is not in the KV cache, and a stop token never is. What closes an answer is carried to the next work,
and so is what is to be taken back of it: only then is it known how much of it was heard.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from engine.models.family import Family
from engine.types import Features, Finish, Intake, TurnMode, Work


@dataclass(slots=True)
class _Said:
    """The answer behind the last turn, while it can still be taken back."""

    start: int  # tokens of the conversation before its first
    token_ids: list[int] = field(default_factory=list)
    finish: Finish | None = None  # of its last work
    stop_token: int | None = None  # with which that work stopped
    closed_in: TurnMode | None = None  # None while it is open


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
        self._owed: tuple[int, ...] = self._head  # must come before what is appended next, behind the answer
        self._instruction: tuple[int, ...] = ()  # behind what is owed; a newer one takes its place
        self._num_tokens = 0  # in the KV cache, when the work that runs has taken its tokens in
        self._said: _Said | None = None
        self._is_turn_open = False  # the user's turn has tokens in it
        self.has_spoken = False  # anything beyond the head was said

    @property
    def is_turn_open(self) -> bool:
        return self._is_turn_open

    def open(self) -> Work:
        """Take in the head at once, so that the first turn need not wait for it."""
        return self._work((), (), max_tokens=0)

    def take_in(
        self, intake: Intake, *, is_final: bool, max_tokens: int, num_dropped: int = 0
    ) -> Work | None:
        """Append what was heard; when final, close the turn and decode up to `max_tokens`.

        The last `num_dropped` tokens of the answer before it are forgotten first, nobody heard them. In
        continuous mode only those since the last tick can be: behind the others lies what the user said.

        None when there is nothing to append: nothing was said, or the turn that ends had no words.
        """
        if not intake.token_ids and not (is_final and self._is_turn_open):
            return None
        keep_tokens = self._leave_answer(num_dropped)  # continuous: it goes on as the next tick's answer
        template: tuple[int, ...] = () if self._is_turn_open else self._family.open_turn(self.mode)
        self._is_turn_open = not is_final
        self.has_spoken = True
        tail = self._family.close_turn(self.mode) if is_final else ()
        features = tuple(replace(f, offset=f.offset + len(template)) for f in intake.features)
        tokens = (*template, *intake.token_ids, *tail)
        if not is_final:
            return self._work(tokens, features, max_tokens=0, keep_tokens=keep_tokens)
        work = self._work(tokens, features, max_tokens=max_tokens, keep_tokens=keep_tokens)
        self._said = _Said(self._num_tokens)
        return work

    def go_on(self, max_tokens: int) -> Work:
        """Continue the open answer where the last work left it."""
        said = self._said
        if said is None or said.closed_in is not None or said.finish is not Finish.LENGTH:
            raise RuntimeError("go_on: no answer was cut short")
        return self._work((said.token_ids[-1],), (), max_tokens=max_tokens)

    def settle(self, token_ids: tuple[int, ...], finish: Finish, stop_token: int | None = None) -> None:
        """The work ended with these decoded tokens (all of them, over all its results)."""
        self._num_tokens += len(token_ids) if finish is Finish.STOP else max(0, len(token_ids) - 1)
        if self._said is not None:
            self._said.token_ids += token_ids
            self._said.finish, self._said.stop_token = finish, stop_token

    def close_answer(self) -> None:
        """The answer is over, for whatever reason. No-op where none is open."""
        if self._said is not None and self._said.closed_in is None:
            self._said.closed_in = self.mode

    def instruct(self, instructions: str) -> bool:
        """New instructions. True: nothing was said yet, so the head is replaced and a generation begins.

        Call between turns only.
        """
        self.instructions = instructions
        if self.has_spoken:
            self._instruction = self._family.instruct(instructions)
            return False
        self.generation += 1
        self._head = self._owed = self._family.head(instructions)
        self._num_tokens = 0
        return True

    def _leave_answer(self, num_dropped: int) -> int | None:
        """What closes the answer becomes owed. Gives `Work.keep_tokens`: where the cache must be cut."""
        said, self._said = self._said, None
        if said is None:
            return None
        num_kept = max(0, len(said.token_ids) - num_dropped)
        end = said.start + num_kept
        is_whole = num_kept == len(said.token_ids)
        last: tuple[int, ...] = ()
        if is_whole and num_kept and said.finish is not Finish.STOP:
            end, last = end - 1, (said.token_ids[-1],)  # the engine does not have it
        # What was decoded after a cancel was not reported, and may be in the cache.
        is_cut = end < self._num_tokens or said.finish is Finish.CANCELLED
        self._num_tokens = end
        mode = said.closed_in or self.mode
        if is_whole and said.stop_token is not None:
            closing = self._family.close_stopped(mode, said.stop_token)
        else:
            closing = self._family.close_answer(mode)
        self._owed = (*last, *closing, *self._owed)
        return end if is_cut else None

    def _work(
        self,
        tokens: tuple[int, ...],
        features: tuple[Features, ...],
        *,
        max_tokens: int,
        keep_tokens: int | None = None,
    ) -> Work:
        prefix = self._owed + self._instruction
        self._owed = self._instruction = ()
        self._seq += 1
        self._num_tokens += len(prefix) + len(tokens)
        return Work(
            session_id=self._session_id,
            generation=self.generation,
            seq=self._seq,
            token_ids=prefix + tokens,
            features=tuple(replace(f, offset=f.offset + len(prefix)) for f in features),
            num_head_tokens=len(self._head),
            keep_tokens=keep_tokens,
            max_tokens=max_tokens,
            sampling=self._family.sampling(self.mode),
        )
