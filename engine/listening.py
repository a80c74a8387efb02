"""A session's audio on its way to be heard: bytes to samples, speech or not, turns; and what is dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.audio.queue import AudioQueue
from engine.audio.rate import RateMeter
from engine.audio.resample import PcmDecoder, RawPcm
from engine.config import SessionConfig
from engine.events import SpeechStarted, SpeechStopped, Warning
from engine.notices import Notices
from engine.tally import Tally
from engine.turn_taking import SpeechAudio, SpeechBegan, SpeechEnded, SpeechGate
from engine.types import SAMPLE_RATE, Pcm

IsHeld = Callable[[float], bool]

HELD_LIMIT_S = 30.0  # manual mode: audio kept while an answer runs, since it is not heard before the commit


class Listening:
    """Times are seconds of the caller's clock. `is_held(now)`: an answer keeps the audio from being heard."""

    def __init__(self, config: SessionConfig, tally: Tally, notices: Notices) -> None:
        self.gate = SpeechGate(config.speech)
        self.queue = AudioQueue()  # what passed the gate, or all where nothing is gated
        self._decoder = PcmDecoder(config.sample_rate)
        self._rate = RateMeter(config.sample_rate)
        self._declared_rate = config.sample_rate
        self._tally = tally
        self._notices = notices
        self._usual_limit = round(config.backlog_limit_s * SAMPLE_RATE)
        self._held_limit = max(self._usual_limit, round(HELD_LIMIT_S * SAMPLE_RATE))

    @property
    def num_waiting_samples(self) -> int:
        """For the detector, or to be heard."""
        return self.gate.num_waiting_samples + self.queue.num_samples

    def on_audio(self, data: bytes, is_gated: bool, is_held: IsHeld, now: float) -> list[Warning]:
        """PCM s16le mono of any length at the declared rate."""
        warnings: list[Warning] = []
        if data and (measured := self._rate.push(len(data), now)):
            self._tally.rate_mismatches += 1
            warnings += self._notices.input_rate(measured, self._declared_rate, now)
        audio = self._decoder.push_raw(data)
        self._tally.audio_samples += len(audio)
        return warnings + self._append(self.gate if is_gated else self.queue, audio, is_held, now)

    def end_turn(self, is_held: IsHeld, now: float) -> list[Warning]:
        """The client says that its turn is over."""
        warnings = self._append(self.queue, self._decoder.flush(), is_held, now)
        self.queue.end_turn(now)
        return warnings

    def on_speech(
        self, heard: Pcm, probabilities: Sequence[float], is_interrupting: bool, now: float
    ) -> list[SpeechStarted | SpeechStopped | Warning]:
        """The detector's verdict on audio taken from the gate."""
        events: list[SpeechStarted | SpeechStopped | Warning] = []
        for item in self.gate.push(heard, probabilities, is_interrupting=is_interrupting):
            match item:
                case SpeechBegan(position):
                    events.append(SpeechStarted(audio_ms=_ms(position)))
                case SpeechAudio(audio):
                    events += self._append(self.queue, audio, _never, now)
                case SpeechEnded(position):
                    events.append(SpeechStopped(audio_ms=_ms(position)))
                    self.queue.end_turn(now)
        return events

    def reset(self) -> list[SpeechStopped]:
        """Forget what waits: the turn mode changed. Speech that was told of is over."""
        events = [SpeechStopped(audio_ms=_ms(self.gate.position))] if self.gate.is_speaking else []
        self.queue.clear()
        self.gate.reset()
        return events

    def _append(
        self, to: SpeechGate | AudioQueue, audio: RawPcm | Pcm, is_held: IsHeld, now: float
    ) -> list[Warning]:
        num_waiting = to.num_samples if isinstance(to, AudioQueue) else to.num_waiting_samples
        if num_waiting + len(audio) <= self._usual_limit:
            to.append(audio, self._usual_limit)
            return []
        # What was kept while it was held is not to be dropped as soon as it may be heard.
        was_held = num_waiting > self._usual_limit
        limit = self._held_limit if was_held or is_held(now) else self._usual_limit
        num_dropped = to.append(audio, limit)
        if not num_dropped:
            return []
        self._tally.dropped_samples += num_dropped
        return self._notices.audio_dropped(_ms(self._tally.dropped_samples), limit / SAMPLE_RATE, now)


def _ms(num_samples: int) -> int:
    return round(1000 * num_samples / SAMPLE_RATE)


def _never(now: float) -> bool:
    return False
