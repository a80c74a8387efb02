"""One session: takes frames, events and the time; gives back what is to be sent and what is to be computed.

No I/O, no clock, no thread: the conductor (conductor.py) calls it and carries out what it returns. A tick of
a session is: hear the audio that waits (family), append it to the conversation, run that work in the engine.
At most one tick is running; audio that comes meanwhile joins the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.answering import Answering
from engine.config import SessionConfig
from engine.conversation import Conversation
from engine.errors import SessionError, SessionFault, SessionOver
from engine.events import InputTranscript, ResponseReason, SpeechStarted
from engine.listening import Listening
from engine.models.family import Family
from engine.notices import Notices
from engine.outputs import Cancel, Close, EndGeneration, Output, Submit
from engine.refusals import input_empty, wrong_turn_mode
from engine.tally import Tally
from engine.ticks import Ticks
from engine.turn_taking import SpeechGate
from engine.types import Finish, Hearing, Intake, Pcm, Result, TurnMode, Utterance, Work
from engine.updating import Update, refusal

EXPIRY_WARNING = 0.9  # of the session's tokens
PAUSE_BUDGETS = 2  # continuous mode: without audio for so many budgets, an answer that waits for a tick ends
MIN_ANSWER_TOKENS = 16  # with less room than this a session is over: its answer would end in its first words


class Session:
    """Times are seconds of the caller's clock; methods that may have something to say return outputs."""

    def __init__(self, session_id: str, family: Family, config: SessionConfig, now: float) -> None:
        self.id = session_id
        self.config = config
        self.kv_tokens = 0
        self.num_misses = 0
        self.tally = Tally()
        self._family = family
        self._mode = config.mode
        self._max_tokens = config.max_tokens
        self._conversation = Conversation(session_id, family, config.mode, config.instructions)
        self._notices = Notices()
        self._listening = Listening(config, self.tally, self._notices)
        self._queue = self._listening.queue
        self._ear = family.new_ear()
        self._ticks = Ticks()
        self._work: Work | None = None  # in the engine
        self._work_tokens: list[int] = []
        self._answering = Answering(session_id, family, config.is_aloud and config.voice_rate is not None)
        self._audio_due: float | None = None  # since when waiting audio should have been running
        self._is_answer_due = False
        self._is_turn_heard = False  # the hearing that runs ends a turn
        self._num_unwanted = 0  # turns that have ended, and whose answers were cancelled before they began
        self._update: Update | None = None  # waits for the end of the turn
        self._opened_at = now
        self._last_audio_at = now
        self._is_over = False

    @property
    def backlog_samples(self) -> int:
        """Audio that waits for the detector or to be heard."""
        return self._listening.num_waiting_samples

    @property
    def gate(self) -> SpeechGate:
        """What waits for the voice activity detector, and the detector's state."""
        return self._listening.gate

    # from the client

    def open(self) -> list[Output]:
        created = self.config.created(self.id, self._family.info.name, is_aloud=self._answering.mouth.is_on)
        return [created, *self._submit(self._conversation.open())]

    def on_audio(self, data: bytes, now: float) -> list[Output]:
        """PCM s16le mono of any length at the declared rate."""
        if data:
            self._last_audio_at = now
        is_gated = self._mode is TurnMode.SERVER_VAD
        return [*self._listening.on_audio(data, is_gated, self._is_backlog_held, now)]

    def on_commit(self, now: float) -> list[Output]:
        """The client says that its turn is over; an answer that still runs is interrupted."""
        if self._mode is not TurnMode.MANUAL:
            return [wrong_turn_mode(self._mode)]
        warnings = self._listening.end_turn(self._is_backlog_held, now)
        return [*warnings, *self._interrupt("interrupted", now)]

    def on_cancel(self, now: float) -> list[Output]:
        """The answer that is written or played is not wanted, nor one to a turn that has ended."""
        self._num_unwanted = self._queue.num_ended_turns + self._is_turn_heard
        return self._interrupt("cancelled", now)

    def on_played(self, response_id: str, played_ms: int, now: float) -> list[Output]:
        """How much of an answer's sound the client has played."""
        return self._answering.mouth.on_played(response_id, played_ms, now)

    def on_update(
        self,
        mode: TurnMode | None = None,
        instructions: str | None = None,
        max_tokens: int | None = None,
        is_aloud: bool | None = None,
    ) -> list[Output]:
        """Takes effect at once where nothing runs, else when the turn is over; voice from the next answer."""
        has_spoken = self._conversation.has_spoken
        error = refusal(self._family, self.config, mode, instructions, is_aloud, has_spoken=has_spoken)
        if error is not None:
            return [error]
        if max_tokens is not None:
            self._max_tokens = min(max_tokens, self.config.max_tokens_ceiling)
        old = Update(self._mode, self._conversation.instructions, self._answering.mouth.is_on)
        self._update = (self._update or old).changed(mode, instructions, is_aloud)
        return self._apply_update()

    def on_time(self, now: float) -> list[Output]:
        """Limits that only time can reach; call about once a second."""
        if now - self._last_audio_at > self.config.idle_limit_s:
            return self._over(f"No audio for {self.config.idle_limit_s:g} s: open a new session to talk.")
        if self.config.max_age_s is not None and now - self._opened_at > self.config.max_age_s:
            return self._over(f"The session's {self.config.max_age_s:g} s are over: open a new one.")
        outputs: list[Output] = []
        if self._waits_for_audio(now):
            outputs += [*self._finish_answer("length", now), *self._apply_update()]
        return [*outputs, *self._answering.mouth.on_time(now)]

    # from the voice activity detector, and the voice

    def on_speech(self, heard: Pcm, probabilities: Sequence[float], now: float) -> list[Output]:
        """The detector's verdict on audio taken from the gate."""
        outputs: list[Output] = []
        if self._mode is not TurnMode.SERVER_VAD:
            return outputs  # the mode changed while the detector worked
        is_busy = self._answering.is_busy(now)
        for event in self._listening.on_speech(heard, probabilities, is_busy, now):
            outputs.append(event)
            if isinstance(event, SpeechStarted):
                outputs += self._interrupt("interrupted", now)
        return outputs

    def on_spoken(self, utterance: Utterance, pcm: bytes | None, now: float) -> list[Output]:
        """The sound of a clause, PCM s16le; None where the voice failed."""
        self.tally.sound_samples += len(pcm or b"") // 2
        return self._answering.mouth.on_spoken(utterance, pcm, now)

    # from the scheduler

    @property
    def generation(self) -> int:
        return self._conversation.generation

    @property
    def is_urgent(self) -> bool:
        """A turn has ended and can be heard: its answer must not wait for the session's slot."""
        return self._can_hear and self._queue.has_ended_turn

    @property
    def is_due(self) -> bool:
        return self._can_hear and (self._audio_due is not None or self._queue.has_ended_turn)

    def come_due(self, due: float) -> None:
        """The session's slot: what waits is due from `due` on. A tick that still runs then is a miss."""
        if self._ticks.is_running:
            self.num_misses += self._queue.has_audio
        elif self._is_answer_cut_short:
            self._is_answer_due = True
        elif self._queue.has_audio and self._audio_due is None and not self._is_held(due):
            self._audio_due = due

    def take_hearing(self) -> Hearing:
        """Start a tick with the audio that waits. Only when `is_due`."""
        taken = self._queue.take()
        dues = [t for t in (self._audio_due, taken.ended_at) if t is not None]
        self._ticks.begin(min(dues), len(taken.audio))
        self._audio_due = None
        self._is_turn_heard = taken.ended_at is not None
        is_final = self._is_turn_heard or self._mode is TurnMode.CONTINUOUS
        return Hearing(self.id, self._ear, taken.audio, is_final, self._mode)

    def on_heard(self, intake: Intake, is_final: bool, now: float) -> list[Output]:
        """The family's result for the hearing that was taken."""
        outputs: list[Output] = []
        is_unwanted = self._is_turn_heard and self._num_unwanted > 0
        self._num_unwanted -= is_unwanted
        self._is_turn_heard = False
        if intake.transcript is not None:
            outputs.append(InputTranscript(text=intake.transcript))
        kept = self._answering.kept(now)
        num_dropped = 0 if kept is None else kept.num_dropped_tokens
        if self.config.max_dropped_tokens is not None:
            num_dropped = min(num_dropped, self.config.max_dropped_tokens)
        closes = is_final and not self._goes_on
        work = self._conversation.take_in(
            intake,
            is_final=closes,
            max_tokens=min(self._family.info.max_tokens_per_tick, self._max_tokens),
            num_dropped=num_dropped,
        )
        if work is None:
            if is_final and self._mode is TurnMode.MANUAL:
                outputs.append(input_empty())
            return [*outputs, self._ticks.end(now, self.kv_tokens), *self._apply_update()]
        if kept is not None and kept.heard is not None:
            outputs.append(kept.heard)
        if self._mode is not TurnMode.CONTINUOUS:
            outputs += self._answering.mouth.stop(now)
        if kept is not None or self._mode is not TurnMode.CONTINUOUS:
            self._answering.settle()
        if closes and self._answering.current is None:
            answer = self._answering.begin(self._max_tokens)
            if self._mode is not TurnMode.CONTINUOUS:
                outputs += answer.announce()
        outputs += self._submit(work)
        if closes and is_unwanted:
            outputs += self._interrupt("cancelled", now)
        elif closes and self._mode is TurnMode.MANUAL and self._queue.has_ended_turn:
            outputs += self._interrupt("interrupted", now)  # the next turn was committed meanwhile
        return outputs

    def go_on(self, now: float) -> list[Output]:
        """Continue an answer that the last tick cut short at its token budget, if its slot has come."""
        answer = self._answering.current
        if not self._is_answer_due or not self._is_answer_cut_short or answer is None:
            return []
        self._is_answer_due = False
        self._ticks.begin_answer(now)
        tokens = min(self._family.info.max_tokens_per_tick, answer.remaining_tokens)
        return self._submit(self._conversation.go_on(tokens))

    def on_result(self, result: Result, now: float) -> list[Output]:
        """One engine step's result; one of another generation or work is stale and changes nothing."""
        work = self._work
        if work is None or (result.generation, result.seq) != (work.generation, work.seq):
            return []
        self.kv_tokens = result.num_kv_tokens
        self.tally.tokens += len(result.token_ids)
        outputs: list[Output] = []
        answer = self._answering.current
        if result.token_ids and answer is not None:
            self._ticks.decoded(len(result.token_ids))
            if answer.num_tokens == 0 and self._mode is not TurnMode.CONTINUOUS:
                self._ticks.answered(now)
            self._work_tokens += result.token_ids
            outputs += self._answering.push(result.token_ids, now)
        if result.finish is None:
            return outputs
        if result.finish is Finish.REFUSED:
            self.tally.faults += 1
            return outputs + self._end(SessionFault(result.error or "The engine refused the session's work."))
        tokens = tuple(self._work_tokens)
        self._conversation.settle(tokens, result.finish, result.stop_token)
        self._work, self._work_tokens = None, []
        if work.max_tokens:
            stop_token = result.stop_token
            is_pause = stop_token is not None and self._family.is_pause(self._mode, tokens, stop_token)
            outputs += self._settle_answer(Finish.LENGTH if is_pause else result.finish, now)
        if self._ticks.is_running:
            outputs.append(self._ticks.end(now, self.kv_tokens))
        return outputs + self._apply_update() + self._check_length(now)

    def take_sample(self, now: float) -> float | None:
        """Worst lateness in seconds since the last call, the age of what is still open included.

        None when no work was due: silent sessions must not hide the busy ones.
        """
        answer = self._answering.current
        answer_s = None if answer is None or not self._is_answer_in_the_way else answer.take_lateness(now)
        return self._ticks.take_sample(now, self._audio_due, answer_s)

    # inside

    @property
    def _goes_on(self) -> bool:
        """The user speaks again, or did, since the turn that was heard ended: do not talk into it. What comes
        belongs to the same turn; should it be a noise, its end brings the answer.
        """
        return self._mode is TurnMode.SERVER_VAD and (self.gate.is_speaking or self._queue.has_ended_turn)

    @property
    def _can_hear(self) -> bool:
        return not self._ticks.is_running and self._work is None and not self._is_answer_in_the_way

    @property
    def _is_answer_in_the_way(self) -> bool:
        """What is heard can only be appended behind the answer, when that is over."""
        return self._answering.current is not None and self._mode is not TurnMode.CONTINUOUS

    def _is_held(self, now: float) -> bool:
        """Audio waits although the family could hear it.

        In manual mode while an answer plays: appended behind it, it would keep the answer's unheard part in
        the conversation, should the commit come before its end.
        """
        return self._is_answer_in_the_way or self._is_backlog_held(now)

    @property
    def _is_answer_cut_short(self) -> bool:
        """An answer has used up its tick's tokens and waits for more."""
        return self._is_answer_in_the_way and self._work is None

    def _waits_for_audio(self, now: float) -> bool:
        """Continuous mode: an answer could only go on in a tick with audio, and the client sends none."""
        is_idle = self._work is None and not self._ticks.is_running and not self._queue.has_audio
        is_paused = now - self._last_audio_at > PAUSE_BUDGETS * self._family.info.budget_s
        is_answering = self._answering.current is not None and self._mode is TurnMode.CONTINUOUS
        return is_answering and is_idle and is_paused

    def _is_backlog_held(self, now: float) -> bool:
        return self._mode is TurnMode.MANUAL and self._answering.is_busy(now)

    def _submit(self, work: Work) -> list[Output]:
        limit = self.config.max_session_tokens
        if limit is not None:
            held = self.kv_tokens if work.keep_tokens is None else work.keep_tokens
            room = limit - held - len(work.token_ids)
            if room < (MIN_ANSWER_TOKENS if work.max_tokens else 1):
                return self._over(
                    f"The session reached the model's length of {limit} tokens: open a new one."
                )
            work = replace(work, max_tokens=min(work.max_tokens, room))
        self._work = work
        return [Submit(work)]

    def _settle_answer(self, finish: Finish, now: float) -> list[Output]:
        answer = self._answering.current
        if answer is None:
            return []
        if finish is Finish.STOP:
            return self._finish_answer("stop", now)
        if answer.cut or answer.remaining_tokens <= 0:
            return self._finish_answer(answer.cut or "length", now)
        return []  # it goes on in the next tick

    def _finish_answer(self, reason: ResponseReason, now: float) -> list[Output]:
        self._is_answer_due = False
        if self._answering.current is not None:
            self._conversation.close_answer()
        return self._answering.finish(reason, now)

    def _interrupt(self, reason: ResponseReason, now: float) -> list[Output]:
        """Stop what is being written and what is being played."""
        answer = self._answering.current
        was_cut = answer is None or answer.cut is not None
        outputs = self._answering.cut(reason, now)
        self.tally.interruptions += bool(outputs) or not was_cut
        if was_cut:
            return outputs
        if self._work is not None:
            return [*outputs, Cancel(self._work.generation)]  # its last result finishes the answer
        if self._ticks.is_running:
            return outputs  # continuous: what is being heard will finish it
        return outputs + self._finish_answer(reason, now) + self._apply_update()

    def _apply_update(self) -> list[Output]:
        is_writing = self._work is not None or self._answering.current is not None
        update = self._update
        is_turn_over = not self._conversation.is_turn_open and not self._queue.has_ended_turn
        if update is None or is_writing or self._ticks.is_running or not is_turn_over:
            return []
        self._update = None
        mode, instructions = update.mode, update.instructions
        self._answering.mouth.is_on = update.is_aloud
        outputs: list[Output] = []
        if mode is not self._mode:
            self._mode = self._conversation.mode = mode
            outputs += self._listening.reset()
            self._ear = self._family.new_ear()  # what it heard of a turn is forgotten too
            self._audio_due = None
        outputs.append(update.event(self._max_tokens, self.config.voice_rate))
        old_generation = self._conversation.generation
        if instructions != self._conversation.instructions and self._conversation.instruct(instructions):
            self.kv_tokens = 0
            outputs += [EndGeneration(old_generation), *self._submit(self._conversation.open())]
        return outputs

    def _check_length(self, now: float) -> list[Output]:
        limit = self.config.max_session_tokens
        if limit is None or self.kv_tokens < EXPIRY_WARNING * limit:
            return []
        return [*self._notices.session_expiring(limit - self.kv_tokens, now)]

    def _over(self, message: str) -> list[Output]:
        return self._end(SessionOver(message))

    def _end(self, error: SessionError) -> list[Output]:
        if self._is_over:
            return []
        self._is_over = True
        self._work = None
        reason: ResponseReason = "length" if isinstance(error, SessionOver) else "failed"
        return [*self._answering.end(reason), Close(error)]
