"""What a session says aloud: answers' text goes in, clauses for the voice and sound for the client come out.

No I/O, no clock. One clause at a time is with the voice. Its sound, and the next clause, are held back while
much sound is ahead of its playback: an interruption wastes little, and what waits at the socket is bounded
however long a clause takes to say.
"""

from __future__ import annotations

from collections import deque

from engine.answer import Answer
from engine.events import ResponseFlush, Warning
from engine.outputs import Hush, Output, Speak
from engine.types import Utterance
from engine.voice.spoken import Kept, Spoken

AHEAD_S = 10.0  # of sound that may wait at the client, and a piece: `on_time` comes long before it is played
VOICE_LIMIT_S = 10.0  # a clause takes some 50 ms: a voice that needs longer is stuck
MAX_ANSWERS = 4  # in continuous mode one may begin while another plays


class Mouth:
    def __init__(self, session_id: str, is_on: bool) -> None:
        self.is_on = is_on  # whether the next answer is spoken
        self._session_id = session_id
        self._answers: deque[Spoken] = deque()  # in the order they are played; the last is being written
        self._speaking: tuple[Utterance, Spoken] | None = None  # with the voice
        self._given_at = 0.0  # when it was given to it

    # the answer's text

    def write(self, answer: Answer, text: str, now: float) -> list[Output]:
        """More of an answer's text; the first makes it the last answer."""
        if not self._answers or self._answers[-1].answer is not answer:
            self._begin(answer, now)
        last = self._answers[-1]
        if not last.is_open:
            return []
        last.write(text)
        return self._go_on(now)

    def end_text(self, answer: Answer, now: float) -> list[Output]:
        """The answer's text is over."""
        if not self._answers or self._answers[-1].answer is not answer:
            return []  # it never had any
        self._answers[-1].end_text()
        return self._go_on(now)

    # from the voice, the client and the clock

    def on_spoken(self, utterance: Utterance, pcm: bytes | None, now: float) -> list[Output]:
        """A clause's sound, None where the voice failed. One that was stopped meanwhile is stale."""
        if self._speaking is None or self._speaking[0] != utterance:
            return []
        (_, spoken), self._speaking = self._speaking, None
        if pcm is None:
            return self._fail(spoken, now)
        spoken.take_in(utterance.text, pcm)
        return self._go_on(now)

    def on_played(self, response_id: str, played_ms: int, now: float) -> list[Output]:
        """The client's report; one of an answer that is settled comes too late."""
        for spoken in self._answers:
            if spoken.answer.response_id == response_id and spoken.is_aloud:
                spoken.playback.report(played_ms, now)
        return self._go_on(now)

    def on_time(self, now: float) -> list[Output]:
        if self._speaking is None or now - self._given_at <= VOICE_LIMIT_S:
            return self._go_on(now)
        (_, spoken), self._speaking = self._speaking, None
        return [Hush(), *self._fail(spoken, now)]

    # interruption

    def is_speaking(self, now: float) -> bool:
        """There is sound to come, or sound that was not played yet."""
        return any(not spoken.is_over(now) for spoken in self._answers)

    def stop(self, now: float) -> list[Output]:
        """Say no more; what was played is settled when the next turn is taken in."""
        outputs: list[Output] = []
        for spoken in [s for s in self._answers if s.can_stop(now)]:
            if spoken.is_aloud:
                outputs.append(ResponseFlush(response_id=spoken.answer.response_id))
            spoken.stop(now)
        if self._speaking is not None:
            self._speaking = None
            outputs.append(Hush())
        return outputs

    def kept(self, now: float) -> Kept | None:
        """What is to be kept of the last answer; None where it was not stopped."""
        last = self._answers[-1] if self._answers else None
        return last.kept(now) if last is not None and last.is_stopped else None

    def settle(self) -> None:
        """The conversation goes on behind the answers: reports about them come too late."""
        self._answers.clear()
        self._speaking = None

    # inside

    def _begin(self, answer: Answer, now: float) -> None:
        self._answers = deque(s for s in self._answers if not s.is_over(now))
        if len(self._answers) == MAX_ANSWERS:
            self._answers.popleft()
        starts_at = now + sum(spoken.playback.ahead_s(now) for spoken in self._answers)
        self._answers.append(Spoken(answer, self.is_on, starts_at))

    def _go_on(self, now: float) -> list[Output]:
        """Sound that may be sent now, the next clause for the voice, the end of sound where it has come."""
        outputs: list[Output] = []
        ahead_s = 0.0
        for spoken in self._answers:
            outputs += spoken.send(ahead_s, AHEAD_S, now)
            ahead_s += spoken.playback.ahead_s(now)
            if self._speaking is not None or spoken.pieces:
                break
            if not spoken.is_open:
                continue
            if not spoken.clauses:
                if not spoken.is_text_done:
                    break  # a later answer waits for this one
                outputs.append(spoken.finish())
            elif ahead_s < AHEAD_S:
                spoken.num_clauses += 1
                response_id, clause = spoken.answer.response_id, spoken.clauses.popleft()
                utterance = Utterance(
                    self._session_id, response_id, spoken.num_clauses, clause, now + ahead_s
                )
                self._speaking, self._given_at = (utterance, spoken), now
                outputs.append(Speak(utterance))
        return outputs

    def _fail(self, spoken: Spoken, now: float) -> list[Output]:
        """No more sound of this answer; its text goes on, and counts as seen."""
        spoken.has_failed = True
        spoken.clauses.clear()
        message = "The rest of this answer cannot be spoken: its text goes on."
        return [Warning(code="voice_failed", message=message), spoken.finish(), *self._go_on(now)]
