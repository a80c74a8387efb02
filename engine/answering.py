"""A session's answers: the one that is being written, and what is still to be heard of those before it."""

from __future__ import annotations

from collections.abc import Sequence

from engine.answer import Answer, ResponseEvent
from engine.events import ResponseReason, ResponseTextDelta
from engine.models.family import Family
from engine.outputs import Output
from engine.voice.mouth import Mouth
from engine.voice.spoken import Kept


class Answering:
    """Text goes to the client as it is written and, where the session wants it, to the mouth."""

    def __init__(self, session_id: str, family: Family, is_aloud: bool) -> None:
        self.mouth = Mouth(session_id, is_aloud)
        self.current: Answer | None = None  # being written
        self._last: Answer | None = None  # the same, or the one before, until it is settled
        self._session_id = session_id
        self._family = family
        self._num_answers = 0

    def is_busy(self, now: float) -> bool:
        """An answer is being written or played."""
        return self.current is not None or self.mouth.is_speaking(now)

    def begin(self, max_tokens: int) -> Answer:
        self._num_answers += 1
        self.current = self._last = Answer(
            f"{self._session_id}-{self._num_answers}",
            self._family.detokenizer(),
            max_tokens,
            self._family.info.playback_tokens_per_s,
        )
        return self.current

    def push(self, token_ids: Sequence[int], now: float) -> list[Output]:
        """The next tokens of the answer that is being written."""
        return [] if self.current is None else self._say(self.current, self.current.push(token_ids, now), now)

    def finish(self, reason: ResponseReason, now: float) -> list[Output]:
        """The answer is written. No-op where none is."""
        answer, self.current = self.current, None
        if answer is None:
            return []
        outputs = self._say(answer, answer.finish(reason), now)
        return [*outputs, *self.mouth.end_text(answer, now)]

    def end(self, reason: ResponseReason) -> list[Output]:
        """The session is over, and with it all sound."""
        answer, self.current = self.current, None
        self.settle()
        return [] if answer is None else [*answer.finish(reason)]

    def cut(self, reason: ResponseReason, now: float) -> list[Output]:
        """Nothing more is said of any answer; the caller finishes the one that is being written."""
        if self.current is not None and self.current.cut is None:
            self.current.cut = reason
        return self.mouth.stop(now)

    def kept(self, now: float) -> Kept | None:
        """What the conversation is to keep of the last answer; None: all of it."""
        last = self._last
        if last is None:
            return None
        if last.cut is not None and not last.text:
            return Kept(last, last.num_tokens, None)
        kept = self.mouth.kept(now)
        return kept if kept is not None and kept.answer is last else None

    def settle(self) -> None:
        """The conversation goes on behind the last answer."""
        self._last = None
        self.mouth.settle()

    def _say(self, answer: Answer, events: Sequence[ResponseEvent], now: float) -> list[Output]:
        outputs: list[Output] = []
        for event in events:
            outputs.append(event)
            if isinstance(event, ResponseTextDelta):
                outputs += self.mouth.write(answer, event.delta, now)
        return outputs
