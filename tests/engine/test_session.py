"""A session's life, on the null stage: no loop, no sleep, a clock of our own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.errors import SessionFault, SessionOver
from engine.events import (
    Error,
    InputTranscript,
    ResponseCreated,
    ResponseDone,
    SessionCreated,
    SessionUpdated,
    SpeechStarted,
    SpeechStopped,
    Tick,
    Warning,
)
from engine.models.null import NullFamily, encode
from engine.outputs import Close
from engine.session import EXPIRY_WARNING
from engine.types import Finish, Result, TurnMode
from tests.support.stage import CONFIG, LIMITS, Stage, pcm


def ask(stage: Stage, session, seconds: float = 1.0) -> None:
    stage.do(session, session.on_audio(pcm(seconds), stage.now))
    stage.do(session, session.on_commit(stage.now))


def test_a_committed_turn_is_heard_and_answered():
    stage = Stage()
    session = stage.open()
    ask(stage, session)
    stage.advance(2.0)
    kinds = [type(e) for e in stage.said["a"]]
    assert kinds[0] is SessionCreated
    assert stage.events("a", InputTranscript)[0].text == "heard 1000 ms"
    assert stage.text() == "echo: heard 1000 ms"
    (done,) = stage.events("a", ResponseDone)
    assert (done.reason, done.tokens) == ("stop", len("echo: heard 1000 ms"))
    assert kinds.index(InputTranscript) < kinds.index(ResponseCreated) < kinds.index(ResponseDone)


def test_an_answer_longer_than_a_tick_goes_on_in_the_next_and_says_the_same():
    short = Stage(NullFamily(max_tokens_per_tick=5))
    session = short.open()
    ask(short, session)
    short.advance(20.0)
    assert short.text() == "echo: heard 1000 ms"
    ticks = [t.tokens for t in short.events("a", Tick) if t.tokens]
    assert ticks == [5, 5, 5, 4]  # never more than a tick may decode


def test_an_answer_ends_at_its_token_limit():
    stage = Stage()
    session = stage.open(max_tokens=7)
    ask(stage, session)
    stage.advance(4.0)
    assert stage.text() == "echo: h"
    assert stage.events("a", ResponseDone)[0].reason == "length"


def test_the_second_turn_begins_with_what_closes_the_first_answer():
    stage = Stage()
    session = stage.open()
    for _ in range(2):
        ask(stage, session)
        stage.advance(3.0)
    assert stage.text() == "echo: heard 1000 ms" * 2
    assert [d.reason for d in stage.events("a", ResponseDone)] == ["stop", "stop"]


def test_lateness_runs_from_the_commit_to_the_first_text_however_late():
    stage = Stage()
    session = stage.open()
    stage.advance(0.5)
    stage.can_step = False
    ask(stage, session)
    stage.advance(5.0)
    assert session.take_sample(stage.now) == pytest.approx(5.0, abs=0.06)  # open: its age so far
    stage.can_step = True
    stage.advance(0.5)
    (tick,) = [t for t in stage.events("a", Tick) if t.audio_ms]
    assert 5000 <= tick.lateness_ms <= 5200


def test_silence_gives_no_sample():
    stage = Stage()
    stage.open()
    stage.advance(10.0)
    assert [s for sample in stage.samples for s in sample.lateness_s] == []


def test_a_tick_that_still_runs_is_a_miss_and_its_audio_joins_the_next():
    stage = Stage()
    session = stage.open()
    stage.can_hear = False
    for _ in range(30):  # three budgets of audio in real time, the family is stuck
        stage.do(session, session.on_audio(pcm(0.2), stage.now))
        stage.advance(0.2)
    assert session.num_misses == 2
    assert len(stage.hearings) == 1  # never queued twice
    stage.can_hear = True
    stage.advance(2.0)
    assert sum(t.audio_ms for t in stage.events("a", Tick)) > 5000


def test_more_audio_than_may_wait_drops_the_oldest_and_says_so():
    stage = Stage()
    session = stage.open()
    stage.do(session, session.on_audio(pcm(10.0), stage.now))
    (warning,) = stage.events("a", Warning)
    assert warning.code == "audio_dropped" and "6000 ms" in warning.message
    stage.do(session, session.on_commit(stage.now))
    stage.advance(2.0)
    assert stage.text() == "echo: heard 4000 ms"


def test_the_wrong_rate_is_noticed():
    stage = Stage()
    session = stage.open(sample_rate=48_000)
    for _ in range(200):  # 16 kHz audio, declared as 48 kHz
        stage.do(session, session.on_audio(pcm(0.02), stage.now))
        stage.now += 0.02
    (warning,) = stage.events("a", Warning)
    assert warning.code == "input_rate" and "16000" in warning.message and "48000" in warning.message


def test_cancel_stops_within_a_step_and_the_session_goes_on():
    stage = Stage(tokens_per_step=1)
    session = stage.open()
    stage.step()
    ask(stage, session)
    for _ in range(4):
        stage.step()
    before = stage.text()
    assert before and len(before) < len("echo: heard 1000 ms")
    stage.do(session, session.on_cancel(stage.now))
    stage.step()
    (done,) = stage.events("a", ResponseDone)
    assert done.reason == "cancelled"
    assert stage.text() == before
    ask(stage, session)
    stage.advance(6.0)
    assert stage.text() == before + "echo: heard 1000 ms"


def test_cancel_between_two_ticks_of_an_answer():
    stage = Stage(NullFamily(max_tokens_per_tick=5))
    session = stage.open()
    stage.step()
    ask(stage, session)
    for _ in range(3):
        stage.step()  # the tick's tokens are used up, the next slot has not come
    stage.do(session, session.on_cancel(stage.now))
    assert stage.events("a", ResponseDone)[0].reason == "cancelled"
    assert not stage.core.has_work


def test_cancel_without_an_answer_changes_nothing():
    stage = Stage()
    session = stage.open()
    assert session.on_cancel(stage.now) == []


def test_a_commit_interrupts_the_running_answer():
    stage = Stage(tokens_per_step=1)
    session = stage.open()
    ask(stage, session)
    for _ in range(4):
        stage.step()
    ask(stage, session, 2.0)
    stage.advance(4.0)
    assert [d.reason for d in stage.events("a", ResponseDone)] == ["interrupted", "stop"]
    assert stage.text().endswith("echo: heard 2000 ms")


def test_an_empty_commit_is_answered_and_harms_nothing():
    stage = Stage()
    session = stage.open()
    stage.do(session, session.on_commit(stage.now))
    stage.advance(1.0)
    (error,) = stage.events("a", Error)
    assert error.code == "input_empty"
    ask(stage, session)
    stage.advance(2.0)
    assert stage.text() == "echo: heard 1000 ms"


def test_a_commit_needs_manual_mode():
    stage = Stage()
    session = stage.open(mode=TurnMode.SERVER_VAD)
    stage.do(session, session.on_commit(stage.now))
    assert stage.events("a", Error)[0].code == "wrong_turn_mode"


def speak(stage: Stage, session, windows: int, probability: float) -> None:
    """The detector's verdict on `windows` windows, as the conductor would bring it."""
    for _ in range(windows):
        stage.do(session, session.on_audio(pcm(0.032), stage.now))
        heard = session.gate.take()
        stage.do(session, session.on_speech(heard, [probability], stage.now))
        stage.advance(0.032, 0.032)


def test_speech_makes_a_turn_and_silence_ends_it():
    stage = Stage()
    session = stage.open(mode=TurnMode.SERVER_VAD)
    speak(stage, session, 20, 0.01)
    speak(stage, session, 50, 0.9)
    speak(stage, session, 60, 0.01)
    (start,), (stop,) = stage.events("a", SpeechStarted), stage.events("a", SpeechStopped)
    assert start.audio_ms == pytest.approx(20 * 32 - 300, abs=33)
    assert stop.audio_ms == pytest.approx(70 * 32 + 550, abs=64)
    assert stage.text() == f"echo: heard {stop.audio_ms - start.audio_ms} ms"


def test_new_speech_interrupts_the_answer():
    stage = Stage(NullFamily(max_tokens_per_tick=2))
    session = stage.open(mode=TurnMode.SERVER_VAD)
    speak(stage, session, 30, 0.9)
    speak(stage, session, 25, 0.01)  # the answer has begun, a few tokens a tick
    assert stage.events("a", ResponseCreated) and not stage.events("a", ResponseDone)
    speak(stage, session, 12, 0.9)
    assert stage.events("a", ResponseDone)[0].reason == "interrupted"


def test_silence_in_server_vad_reaches_neither_family_nor_engine():
    stage = Stage()
    session = stage.open(mode=TurnMode.SERVER_VAD)
    stage.step()
    steps = stage.core.num_steps
    speak(stage, session, 200, 0.01)
    assert stage.core.num_steps == steps and not stage.events("a", Tick)[1:]


def test_continuous_mode_answers_each_tick():
    stage = Stage()
    session = stage.open(mode=TurnMode.CONTINUOUS)
    for _ in range(30):
        stage.do(session, session.on_audio(pcm(0.2), stage.now))
        stage.advance(0.2)
    assert len(stage.events("a", ResponseDone)) >= 2
    assert "echo: heard 2000 ms" in stage.text()


class Pausing(NullFamily):
    def is_pause(self, mode: TurnMode, token_ids: Sequence[int], stop_token: int) -> bool:
        return stop_token == 1


def test_an_answer_that_only_pauses_goes_on_in_the_next_tick():
    stage = Stage(Pausing())
    stage.can_step = False
    session = stage.open(mode=TurnMode.CONTINUOUS)
    stage.core.step()
    session.on_result(Result("a", 0, 1, (), Finish.FED, 5), stage.now)
    for seq, stop_token in ((2, 1), (3, 2)):
        stage.do(session, session.on_audio(pcm(0.5), stage.now))
        stage.advance(2.0)
        result = Result("a", 0, seq, encode("so"), Finish.STOP, 50, stop_token=stop_token)
        stage.do(session, session.on_result(result, stage.now))
        assert len(stage.events("a", ResponseDone)) == (stop_token == 2)
    assert stage.text() == "soso"
    assert len(stage.events("a", ResponseCreated)) == 1


def test_an_answer_that_waits_for_audio_which_does_not_come_ends():
    stage = Stage(NullFamily(max_tokens_per_tick=5))
    session = stage.open(mode=TurnMode.CONTINUOUS)
    stage.do(session, session.on_audio(pcm(1.0), stage.now))
    stage.advance(3.0)
    assert stage.text() == "echo:" and not stage.events("a", ResponseDone)
    stage.do(session, session.on_update(instructions="answer in French"))
    stage.advance(2.0)
    (done,) = stage.events("a", ResponseDone)
    assert (done.reason, done.tokens) == ("length", 5)
    assert stage.events("a", SessionUpdated)
    stage.do(session, session.on_audio(pcm(1.0), stage.now))  # the session goes on
    stage.advance(3.0)
    assert len(stage.events("a", ResponseCreated)) == 2


def test_instructions_before_the_first_turn_replace_the_head():
    stage = Stage()
    session = stage.open()
    stage.step()
    first = session.generation
    stage.do(session, session.on_update(None, "answer in French", None))
    assert session.generation == first + 1
    stage.step()
    assert stage.core.stats().num_sessions == 1  # the old generation was freed
    (updated,) = stage.events("a", SessionUpdated)
    assert updated.instructions == "answer in French"


def test_a_head_longer_than_is_kept_is_refused_and_the_old_one_stays():
    stage = Stage()
    session = stage.open(max_head_tokens=20)
    stage.step()
    stage.do(session, session.on_update(None, "x" * 40, 5))
    (error,) = stage.events("a", Error)
    assert error.code == "instructions_too_long" and "42 tokens" in error.message and "20" in error.message
    assert session.generation == 0 and not stage.events("a", SessionUpdated)
    ask(stage, session)
    stage.advance(2.0)
    assert stage.text() == "echo: heard 1000 ms"
    stage.do(session, session.on_update(None, "y" * 40, None))  # in a conversation they are no head
    assert stage.events("a", SessionUpdated)
    stage.do(session, session.on_update(None, "z" * 2000, None))
    assert "1024" in stage.events("a", Error)[-1].message


def test_instructions_in_a_conversation_wait_for_the_turns_end_and_keep_it():
    stage = Stage()
    session = stage.open()
    ask(stage, session)
    for _ in range(3):
        stage.step()
    stage.do(session, session.on_update(None, "answer in French", 12))
    assert not stage.events("a", SessionUpdated)
    stage.advance(3.0)
    assert stage.events("a", SessionUpdated) and session.generation == 0
    ask(stage, session)
    stage.advance(3.0)
    assert stage.text().endswith("echo: heard ")  # the new max_tokens


def test_a_mode_change_right_behind_a_commit_does_not_cost_the_turn():
    stage = Stage()
    session = stage.open()
    stage.step()
    ask(stage, session)
    stage.do(session, session.on_update(TurnMode.SERVER_VAD))
    assert not stage.events("a", SessionUpdated)
    stage.advance(3.0)
    assert stage.text() == "echo: heard 1000 ms"
    (updated,) = stage.events("a", SessionUpdated)
    assert updated.turn == "server_vad"


def test_a_mode_change_in_the_middle_of_speech_forgets_all_of_it_and_says_that_it_is_over():
    stage = Stage()
    session = stage.open(mode=TurnMode.SERVER_VAD)
    speak(stage, session, 100, 0.9)
    assert len(stage.events("a", SpeechStarted)) == 1 and stage.events("a", Tick)  # some of it was heard
    stage.do(session, session.on_update(TurnMode.MANUAL))
    (stopped,) = stage.events("a", SpeechStopped)
    (updated,) = stage.events("a", SessionUpdated)
    assert stopped.audio_ms == 3200
    assert stage.said["a"].index(stopped) < stage.said["a"].index(updated)
    ask(stage, session)
    stage.advance(3.0)
    assert stage.text() == "echo: heard 1000 ms"


def test_a_mode_that_is_not_offered_is_refused_with_the_reason():
    family = NullFamily()
    reasons = {TurnMode.CONTINUOUS: "it cannot listen while it talks"}
    family.info = replace(family.info, turn_modes=(TurnMode.MANUAL,), refused_modes=reasons)
    stage = Stage(family)
    session = stage.open()
    stage.do(session, session.on_update(TurnMode.CONTINUOUS, None, None))
    (error,) = stage.events("a", Error)
    assert error.code == "turn_mode_refused" and "cannot listen while it talks" in error.message


def test_a_session_near_the_models_length_is_warned_and_then_closed_cleanly():
    stage = Stage()
    session = stage.open(max_session_tokens=400)
    while not (closes := stage.events("a", Close)):
        ask(stage, session)
        stage.advance(3.0)
        assert stage.now < 2000
    warnings = [w for w in stage.events("a", Warning) if w.code == "session_expiring"]
    assert warnings and isinstance(closes[0].error, SessionOver)
    assert "open a new one" in str(closes[0].error)
    assert session.kv_tokens >= EXPIRY_WARNING * 400 - 64
    assert stage.core.stats().num_sessions == 0


def test_a_session_of_an_engine_without_a_length_never_hears_of_one():
    stage = Stage()
    stage.core.limits = replace(stage.core.limits, max_session_tokens=None)
    session = stage.open(max_session_tokens=None)
    (created,) = stage.events("a", SessionCreated)
    assert created.limits.max_session_tokens is None
    while session.kv_tokens < 2 * 400:
        ask(stage, session)
        stage.advance(3.0)
        assert not stage.events("a", Close)
    assert not [w for w in stage.events("a", Warning) if w.code == "session_expiring"]


def test_work_that_the_engine_refuses_ends_this_session_only():
    stage = Stage()
    broken, other = stage.open("a"), stage.open("b")
    stage.advance(0.1)
    ask(stage, broken)
    ask(stage, other)
    stage.hearings += stage.scheduler.take_batch(stage.do)
    for hearing, intake in zip(stage.hearings, stage.family.hear(stage.hearings), strict=True):
        session = stage.scheduler.get(hearing.session_id)
        assert session is not None
        stage.do(session, session.on_heard(intake, hearing.is_final, stage.now))
    stage.hearings = []
    refused = Result("a", 0, 2, (), Finish.REFUSED, 0, "too long")
    stage.do(broken, broken.on_result(refused, stage.now))
    (close,) = stage.events("a", Close)
    assert isinstance(close.error, SessionFault) and close.error.close_code == 1011
    stage.advance(2.0)
    assert stage.text("b") == "echo: heard 1000 ms"


def test_results_of_another_generation_or_work_are_dropped():
    stage = Stage()
    session = stage.open()
    stage.step()
    for generation, seq in ((7, 1), (0, 99)):
        assert session.on_result(Result("a", generation, seq, (65,), Finish.STOP, 10), stage.now) == []
    assert stage.text() == ""


def test_a_session_that_sends_nothing_is_closed():
    stage = Stage()
    session = stage.open()
    assert session.on_time(stage.now + CONFIG.idle_limit_s - 1) == []
    (close,) = session.on_time(stage.now + CONFIG.idle_limit_s + 1)
    assert isinstance(close, Close) and close.error.close_code == 1000


def test_two_sessions_never_share_a_word():
    stage = Stage()
    sessions = {name: stage.open(name) for name in "ab"}
    for name, seconds in (("a", 1.0), ("b", 2.0)):
        ask(stage, sessions[name], seconds)
    stage.advance(3.0)
    assert stage.text("a") == "echo: heard 1000 ms"
    assert stage.text("b") == "echo: heard 2000 ms"


@pytest.mark.parametrize("mode", [TurnMode.SERVER_VAD, TurnMode.MANUAL, TurnMode.CONTINUOUS])
def test_nothing_is_late_where_nothing_is_slow(mode: TurnMode):
    """Any talk, at any phase of the slots: on an instant family and engine no tick waits for anything."""
    rng = random.Random(11)
    family = NullFamily(max_tokens_per_tick=12)
    family.info = replace(family.info, playback_tokens_per_s=5.0)  # a tick's tokens last until the next
    stage = Stage(family, num_slots=3)
    sessions = [stage.open(str(i), mode=mode, max_session_tokens=1 << 20) for i in range(3)]
    for _ in range(150):
        session = rng.choice(sessions)
        match mode, rng.random():
            case TurnMode.SERVER_VAD, _:
                speak(stage, session, rng.randint(1, 60), rng.choice([0.01, 0.9]))
            case TurnMode.MANUAL, dice if dice < 0.2:
                stage.do(session, session.on_commit(stage.now))
            case _, dice if dice < 0.3:
                stage.do(session, session.on_cancel(stage.now))
            case _:
                stage.do(session, session.on_audio(pcm(rng.uniform(0.0, 0.5)), stage.now))
        stage.advance(rng.uniform(0.0, 0.4))
    ticks = [t for session in sessions for t in stage.events(session.id, Tick)]
    assert len(ticks) > 30
    assert max(t.lateness_ms for t in ticks) <= 200  # a few of the stage's steps
    assert max((s for sample in stage.samples for s in sample.lateness_s), default=0) <= 0.2


def test_limits_of_the_stage_match_the_engine():
    assert CONFIG.max_session_tokens == LIMITS.max_session_tokens
