"""One answer on its way to being heard: its clauses, its sound, and what of it was played."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from engine.answer import Answer
from engine.events import ResponseAudio, ResponseAudioDone, ResponseHeard
from engine.outputs import Sound
from engine.voice.clauses import ClauseCutter
from engine.voice.playback import Playback, whole_words
from engine.voice.voice import VOICE_RATE

PIECE_SAMPLES = VOICE_RATE  # of one message: an interruption wastes little, and the outbox stays small
_BYTES = 2  # of a sample


@dataclass(frozen=True, slots=True)
class Kept:
    """What the conversation keeps of an answer that was cut."""

    answer: Answer
    num_dropped_tokens: int  # the answer's last ones, to be forgotten
    heard: ResponseHeard | None  # for the client; None for an answer that was not spoken


class Spoken:
    """The state of one answer's sound. `mouth.py` decides when what happens."""

    def __init__(self, answer: Answer, is_aloud: bool, starts_at: float) -> None:
        self.answer = answer
        self.is_aloud = is_aloud  # False: text only
        self.has_failed = False  # the voice did; its text went on
        self.is_stopped = False
        self.is_text_done = False
        self.is_done = False  # all of its sound was sent
        self.clauses: deque[str] = deque()  # for the voice
        self.num_clauses = 0  # given to it
        self.pieces: deque[Sound] = deque()  # of the last clause's sound, not sent yet
        self.playback = Playback(starts_at)
        self._cutter = ClauseCutter()

    @property
    def is_open(self) -> bool:
        """More sound may come."""
        return self.is_aloud and not self.is_stopped and not self.is_done

    def is_over(self, now: float) -> bool:
        """Nothing of its sound is left to come or to be played."""
        return not self.is_open and (self.is_stopped or self.playback.ahead_s(now) <= 0)

    def can_stop(self, now: float) -> bool:
        """Stopping it would change anything: it is being written, or still played."""
        return not self.is_stopped and not (self.is_text_done and self.is_over(now))

    def write(self, text: str) -> None:
        self.clauses += self._cutter.push(text)

    def end_text(self) -> None:
        self.is_text_done = True
        self.clauses += self._cutter.flush()

    def take_in(self, text: str, pcm: bytes) -> None:
        """A clause's sound: cut into messages of about a second, each with its share of the words."""
        num_samples = len(pcm) // _BYTES
        self.playback.begin(text, num_samples)
        count = -(-num_samples // PIECE_SAMPLES)
        begin = 0
        for i in range(count):
            part = pcm[i * num_samples // count * _BYTES : (i + 1) * num_samples // count * _BYTES]
            end = max(begin, whole_words(text, (i + 1) / count))
            event = ResponseAudio(
                response_id=self.answer.response_id,
                text=text[begin:end],
                duration_ms=_ms(len(part) // _BYTES),
                num_bytes=len(part),
            )
            self.pieces.append(Sound(event, part))
            begin = end

    def send(self, before_s: float, ahead_s: float, now: float) -> list[Sound]:
        """What may be sent now, so that about `ahead_s` wait to be played, `before_s` of other answers'."""
        sounds: list[Sound] = []
        while self.pieces and before_s + self.playback.ahead_s(now) < ahead_s:
            sounds.append(self.pieces.popleft())
            self.playback.sent(len(sounds[-1].pcm) // _BYTES, now + before_s)
        return sounds

    def finish(self) -> ResponseAudioDone:
        self.is_done = True
        duration_ms = _ms(self.playback.num_samples)
        return ResponseAudioDone(response_id=self.answer.response_id, duration_ms=duration_ms)

    def stop(self, now: float) -> None:
        self.is_stopped = True
        self.clauses.clear()
        self.pieces.clear()
        self.playback.flush(now)

    def kept(self, now: float) -> Kept:
        """Aloud, what was played is kept; of a text, what the client was sent."""
        answer = self.answer
        by_ear = self.is_aloud and not self.has_failed
        num_chars = self.playback.heard_chars(now) if by_ear else len(answer.text)
        num_dropped = answer.num_tokens - answer.num_tokens_within(num_chars)
        if not self.is_aloud:
            return Kept(answer, num_dropped, None)
        heard = ResponseHeard(
            response_id=answer.response_id,
            text=answer.text[:num_chars],
            played_ms=_ms(self.playback.played(now)),
        )
        return Kept(answer, num_dropped, heard)


def _ms(num_samples: int) -> int:
    return round(1000 * num_samples / VOICE_RATE)
