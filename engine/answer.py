"""One answer while it is being written: its text, its token budget, whether it keeps up with its playback."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from engine.events import ResponseCreated, ResponseDone, ResponseReason, ResponseTextDelta
from engine.models.family import Detokenizer

ResponseEvent = ResponseCreated | ResponseTextDelta | ResponseDone


class Answer:
    """Tokens arrive in bursts; playback uses them up at `tokens_per_s` from the first on.

    An answer is late only where playback runs dry (design.md, Time). Times are seconds of the caller's clock.
    """

    def __init__(self, response_id: str, detokenizer: Detokenizer, max_tokens: int, tokens_per_s: float):
        self.response_id = response_id
        self._detokenizer = detokenizer
        self._max_tokens = max_tokens
        self._tokens_per_s = tokens_per_s
        self._is_announced = False
        self.text = ""  # what the client was sent
        self._num_chars = 0  # of all tokens, those not sent included
        self._ends: list[int] = []  # characters that are certain after each token
        self.cut: ResponseReason | None = None  # set when it was cut off: nothing more is said
        self._dry_at: float | None = None  # when playback has used up all tokens so far
        self._worst_s = 0.0  # longest dry spell since the last `take_lateness`

    @property
    def num_tokens(self) -> int:
        return len(self._ends)

    @property
    def remaining_tokens(self) -> int:
        return self._max_tokens - self.num_tokens

    def announce(self) -> list[ResponseEvent]:
        """Tell the client that an answer begins, once."""
        if self._is_announced:
            return []
        self._is_announced = True
        return [ResponseCreated(response_id=self.response_id)]

    def push(self, token_ids: Sequence[int], now: float) -> list[ResponseEvent]:
        """The next tokens; an unfinished character is held back, and all text once the answer was cut."""
        dry_at = now if self._dry_at is None else self._dry_at
        self._worst_s = max(self._worst_s, now - dry_at)
        self._dry_at = max(dry_at, now) + len(token_ids) / self._tokens_per_s
        return self._say("".join(self._text_of(token_id) for token_id in token_ids))

    def num_tokens_within(self, num_chars: int) -> int:
        """The tokens whose text lies within the answer's first `num_chars` characters."""
        if num_chars >= self._num_chars:
            return len(self._ends)
        end = max(0, bisect_right(self._ends, num_chars) - 1)
        if not self._ends or not 0 < self._ends[end] <= num_chars:
            return 0
        return bisect_left(self._ends, self._ends[end]) + 1  # not those that only begin the next character

    def finish(self, reason: ResponseReason) -> list[ResponseEvent]:
        """The answer is over. Nothing where it was never announced: the model chose to be silent."""
        if not self._is_announced:
            return []
        tail = self._say(self._detokenizer.flush())
        done = ResponseDone(response_id=self.response_id, reason=self.cut or reason, tokens=self.num_tokens)
        return [*tail, done]

    def take_lateness(self, now: float) -> float:
        """Seconds that playback was, or has been, dry since the last call."""
        open_s = 0.0 if self._dry_at is None else max(0.0, now - self._dry_at)
        worst, self._worst_s = max(self._worst_s, open_s), 0.0
        return worst

    def _text_of(self, token_id: int) -> str:
        text = self._detokenizer.push((token_id,))
        self._num_chars += len(text)
        self._ends.append(self._num_chars)
        return text

    def _say(self, text: str) -> list[ResponseEvent]:
        if not text or self.cut is not None:
            return []
        self.text += text
        return [*self.announce(), ResponseTextDelta(response_id=self.response_id, delta=text)]
