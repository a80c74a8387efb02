"""What the conversation keeps of an answer that was interrupted: what was heard. A clock of our own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from app.outbox import LIMIT_BYTES
from engine.events import (
    ResponseAudioDone,
    ResponseCreated,
    ResponseDone,
    ResponseFlush,
    ResponseHeard,
    SessionCreated,
    SessionUpdated,
    SpeechStarted,
    Warning,
)
from engine.listening import HELD_LIMIT_S
from engine.models.null import NullFamily, encode
from engine.null import NullCore
from engine.outputs import Close, Sound
from engine.session import Session
from engine.types import SAMPLE_RATE, Hearing, Intake, Result, TurnMode
from engine.voice.mouth import AHEAD_S, VOICE_LIMIT_S
from engine.voice.voice import VOICE_RATE, Sound16
from tests.fuzz.grammar import Grammar
from tests.support.stage import LIMITS, Stage, pcm, readable
from tests.support.voices import ToneVoice

STORY = "Once there was a fox, who lived alone in the old forest. He had a friend, a small grey owl."
CHAR_S = 0.06  # of the tone voice


class Hears(NullFamily):
    """Understands every turn as the next of these texts, which the null engine says back."""

    def __init__(
        self, texts: Sequence[str] = (STORY, "next", "last"), max_tokens_per_tick: int = 200
    ) -> None:
        super().__init__(max_tokens_per_tick=max_tokens_per_tick)
        self._texts = list(texts)

    def hear(self, batch: Sequence[Hearing]) -> list[Intake]:
        return [self._next(hearing) for hearing in batch]

    def _next(self, hearing: Hearing) -> Intake:
        is_nothing = not hearing.is_final or (hearing.mode is TurnMode.CONTINUOUS and not hearing.audio.any())
        if is_nothing or not self._texts:
            return Intake()
        text = self._texts.pop(0)
        return Intake(encode(text), transcript=text)


def spoken_stage(family: NullFamily | None = None, **changes) -> tuple[Stage, Session]:
    stage = Stage(family or Hears(), tokens_per_step=40)
    changes = {"max_tokens": 200, "is_aloud": True, "voice_rate": VOICE_RATE} | changes
    session = stage.open(**changes)
    stage.step()
    return stage, session


def commit(stage: Stage, session: Session) -> None:
    stage.do(session, session.on_audio(pcm(1.0), stage.now))
    stage.do(session, session.on_commit(stage.now))


def until_written(stage: Stage, num_answers: int = 1) -> None:
    while len(stage.events("a", ResponseDone)) < num_answers:
        stage.advance(0.01, 0.01)


def sound_ms(stage: Stage) -> int:
    return sum(sound.event.duration_ms for sound in stage.events("a", Sound))


def cache(stage: Stage) -> str:
    """What the model knows; without the instructions and the first question."""
    return readable(stage.caches["a"]).removeprefix("{be brief|").removeprefix(f"({STORY})")


def played(stage: Stage, session: Session, ms: int, answer: int = 1) -> None:
    stage.do(session, session.on_played(f"a-{answer}", ms, stage.now))


def test_an_answer_is_spoken_clause_by_clause_while_it_is_written():
    stage, session = spoken_stage(Hears(max_tokens_per_tick=40))
    commit(stage, session)
    stage.advance(0.2)
    assert stage.events("a", Sound) and not stage.events("a", ResponseDone)
    stage.advance(10.0)
    sounds = stage.events("a", Sound)
    assert "".join(s.event.text for s in sounds) == stage.text() == f"echo: {STORY}"
    assert all(s.event.num_bytes == len(s.pcm) for s in sounds)
    assert all(s.event.duration_ms <= 1000 for s in sounds)
    assert sum(len(s.pcm) for s in sounds) == 2 * len(stage.text()) * CHAR_S * VOICE_RATE
    (done,) = stage.events("a", ResponseAudioDone)
    assert done.duration_ms == pytest.approx(len(stage.text()) * 1000 * CHAR_S)
    assert stage.said["a"].index(done) > stage.said["a"].index(sounds[-1])


def test_without_a_voice_nothing_is_spoken_and_the_client_is_told():
    stage, session = spoken_stage(is_aloud=False)
    (created,) = stage.events("a", SessionCreated)
    assert (created.voice, created.voice_sample_rate) == (False, VOICE_RATE)
    commit(stage, session)
    stage.advance(5.0)
    assert stage.text() and not stage.events("a", Sound) and not stage.events("a", ResponseAudioDone)


def test_the_voice_can_be_turned_on_and_off_and_refused():
    stage, session = spoken_stage(Hears(["one", "two", "three"]), is_aloud=False)
    for is_aloud, num_done in ((True, 1), (False, 1), (None, 1)):
        stage.do(session, session.on_update(is_aloud=is_aloud))
        assert stage.events("a", SessionUpdated)[-1].voice is bool(is_aloud)
        commit(stage, session)
        stage.advance(4.0)
        assert len(stage.events("a", ResponseAudioDone)) == num_done
    mute = stage.open("b", is_aloud=True)  # a server without a voice
    assert not stage.events("b", SessionCreated)[0].voice
    (error,) = mute.on_update(is_aloud=True)
    assert error.code == "no_voice"  # pyright: ignore[reportAttributeAccessIssue]


def test_what_was_played_by_the_reports_is_kept_and_the_rest_forgotten():
    stage, session = spoken_stage()
    commit(stage, session)
    until_written(stage)
    for ms in range(0, 1600, 250):
        played(stage, session, ms)
        stage.advance(0.25)
    commit(stage, session)  # in the middle of playback
    (flush,) = stage.events("a", ResponseFlush)
    assert flush.response_id == "a-1"
    played(stage, session, 1700)  # right after the flush: exactly
    until_written(stage, 2)
    heard = "echo: Once there was a fox,"  # 28 characters at 60 ms are 1680 ms
    (event,) = stage.events("a", ResponseHeard)
    assert (event.text, event.played_ms) == (heard, 1700)
    assert cache(stage) == f"{heard}|(next)echo: next"
    assert [d.reason for d in stage.events("a", ResponseDone)] == ["stop", "stop"]


def test_a_word_that_was_begun_was_not_heard():
    stage, session = spoken_stage()
    commit(stage, session)
    until_written(stage)
    stage.advance(1.0)
    commit(stage, session)
    played(stage, session, 21 * 60)  # "echo: Once there was a|"
    until_written(stage, 2)
    assert stage.events("a", ResponseHeard)[0].text == "echo: Once there was"
    assert cache(stage).startswith("echo: Once there was|(next)")


def test_without_reports_what_was_sent_in_real_time_was_heard():
    stage, session = spoken_stage()
    commit(stage, session)
    until_written(stage)
    begin = stage.now
    stage.advance(1.5)
    commit(stage, session)
    stage.advance(1.0)
    (event,) = stage.events("a", ResponseHeard)
    assert event.played_ms == pytest.approx(1500, abs=150)  # from the first sound on
    assert event.text.startswith("echo: Once there") and len(event.text) <= (stage.now - begin) / CHAR_S
    assert cache(stage).startswith(f"{event.text}|(next)")


def test_reports_that_stop_coming_are_filled_up_with_time():
    stage, session = spoken_stage()
    commit(stage, session)
    until_written(stage)
    played(stage, session, 300)
    stage.advance(0.5)
    commit(stage, session)  # the client does not report after the flush
    stage.advance(1.0)
    assert stage.events("a", ResponseHeard)[0].played_ms == pytest.approx(800, abs=60)


def test_a_client_can_claim_no_more_than_it_was_sent_and_not_less_than_before():
    stage, session = spoken_stage(Hears([STORY * 3, "next"]), max_tokens=400)
    commit(stage, session)
    until_written(stage)
    sent_ms = sound_ms(stage)
    assert sent_ms < len(stage.text()) * 60
    stage.can_speak = False
    played(stage, session, 80_000_000)
    commit(stage, session)
    played(stage, session, 10)
    stage.advance(1.0)
    (event,) = stage.events("a", ResponseHeard)
    assert event.played_ms == pytest.approx(sent_ms, abs=2)
    assert sent_ms / 60 - 10 < len(event.text) <= sent_ms / 60 + 1  # whole words of it


def test_reports_of_a_stale_or_unknown_response_change_nothing():
    stage, session = spoken_stage()
    commit(stage, session)
    until_written(stage)
    played(stage, session, 200)
    commit(stage, session)
    played(stage, session, 400)
    until_written(stage, 2)
    before = cache(stage)
    played(stage, session, 4000)  # of the first answer, long settled
    stage.do(session, session.on_played("someone-else-1", 4000, stage.now))
    commit(stage, session)
    stage.advance(1.0)
    assert cache(stage).startswith(before.split("|")[0])
    assert len(stage.events("a", ResponseHeard)) == 2
    assert stage.events("a", ResponseHeard)[1].played_ms < 1000


def test_nothing_played_leaves_an_empty_answer_in_a_valid_template():
    stage, session = spoken_stage()
    commit(stage, session)
    until_written(stage)
    commit(stage, session)
    played(stage, session, 0)
    until_written(stage, 2)
    assert stage.events("a", ResponseHeard)[0].text == ""
    assert cache(stage) == "|(next)echo: next"


def test_an_interruption_while_the_answer_is_written_stops_both_at_once():
    stage = Stage(Hears(), tokens_per_step=4)
    session = stage.open(max_tokens=200, is_aloud=True, voice_rate=VOICE_RATE)
    commit(stage, session)
    stage.advance(0.5)
    stage.can_speak = False
    stage.advance(0.3)
    assert not stage.events("a", ResponseDone)
    stage.do(session, session.on_cancel(stage.now))
    assert stage.events("a", ResponseFlush) and not stage.utterances  # at once, and nothing waits
    num_sounds = len(stage.events("a", Sound))
    stage.can_speak = True
    stage.advance(0.1)
    assert stage.events("a", ResponseDone)[0].reason == "cancelled"
    stage.advance(3.0)
    assert len(stage.events("a", Sound)) == num_sounds and not stage.events("a", ResponseAudioDone)
    commit(stage, session)
    stage.advance(2.0)
    heard = stage.events("a", ResponseHeard)[0].text
    assert heard and f"echo: {STORY}".startswith(heard)
    assert cache(stage).startswith(f"{heard}|(next)echo: next")


def test_an_interruption_in_the_first_clause_keeps_its_words_only():
    stage, session = spoken_stage(Hears(["A long first sentence without any pause in it.", "next"]))
    commit(stage, session)
    until_written(stage)
    stage.do(session, session.on_cancel(stage.now))
    played(stage, session, 700)  # of "echo:" 300, then 400 of " A long first ..."
    commit(stage, session)
    stage.advance(1.0)
    assert stage.events("a", ResponseHeard)[0].text == "echo: A"


def test_an_answer_played_to_its_end_is_whole_and_a_cancel_after_it_says_nothing():
    stage, session = spoken_stage()
    commit(stage, session)
    stage.advance(10.0)
    assert session.on_cancel(stage.now) == []
    commit(stage, session)
    until_written(stage, 2)
    assert not stage.events("a", ResponseFlush) and not stage.events("a", ResponseHeard)
    assert cache(stage) == f"echo: {STORY}|(next)echo: next"


def test_no_more_is_taken_back_than_the_engine_can():
    stage, session = spoken_stage(max_dropped_tokens=20)
    commit(stage, session)
    until_written(stage)
    commit(stage, session)
    played(stage, session, 0)
    until_written(stage, 2)
    assert cache(stage).startswith(f"echo: {STORY[:-20]}|(next)")


def test_text_only_an_interruption_keeps_what_was_sent():
    stage = Stage(Hears(), tokens_per_step=4)
    session = stage.open(max_tokens=200)
    commit(stage, session)
    stage.advance(0.4)
    stage.do(session, session.on_cancel(stage.now))
    commit(stage, session)
    stage.advance(1.0)
    seen = stage.text().split("echo: next")[0]
    assert f"echo: {STORY}".startswith(seen) and len(seen) > 8
    assert cache(stage).startswith(f"{seen}|(next)")
    assert not stage.events("a", ResponseFlush) and not stage.events("a", ResponseHeard)


class LateCancel(NullCore):
    """As real engines do, it decodes on before it sees a cancel, and does not report that."""

    def _step_one(self, state, work) -> Result:
        if state.is_cancelled and state.is_fed:
            state.num_tokens += 3
        return super()._step_one(state, work)


@pytest.mark.parametrize("is_aloud", [True, False])
def test_what_is_decoded_after_a_cancel_and_not_reported_is_forgotten(is_aloud: bool):
    stage = Stage(Hears(), tokens_per_step=4)
    stage.core = LateCancel(LIMITS, 4)
    session = stage.open(max_tokens=200, is_aloud=is_aloud, voice_rate=VOICE_RATE)
    commit(stage, session)
    stage.advance(0.4)
    stage.do(session, session.on_cancel(stage.now))
    commit(stage, session)
    stage.advance(3.0)  # the stage compares the cache's length with the engine's
    assert "|(next)echo: next" in cache(stage)


def test_a_manual_turn_is_heard_when_it_is_committed_not_when_playback_ends():
    stage, session = spoken_stage()
    commit(stage, session)
    until_written(stage)
    num_works = len(stage.works)
    for _ in range(10):
        stage.do(session, session.on_audio(pcm(0.2), stage.now))
        stage.advance(0.2)
    assert len(stage.works) == num_works  # held: behind it the answer could not be taken back
    assert session.backlog_samples == 32_000 and not stage.events("a", Warning)
    stage.do(session, session.on_commit(stage.now))
    stage.advance(0.1)
    assert stage.text().endswith("echo: next")


def test_audio_that_is_held_while_an_answer_plays_is_heard_when_that_ends():
    stage, session = spoken_stage(Hears([STORY, "x"]))
    commit(stage, session)
    until_written(stage)
    stage.do(session, session.on_audio(pcm(1.0), stage.now))
    stage.advance(12.0)
    assert session.backlog_samples == 0


def test_audio_that_was_held_is_not_dropped_when_the_next_frame_comes_after_the_answer():
    stage, session = spoken_stage(Hears([STORY, "x"]))
    commit(stage, session)
    until_written(stage)
    stage.can_hear = False
    stage.do(session, session.on_audio(pcm(9.0), stage.now))  # more than two budgets
    while session._answering.is_busy(stage.now):
        stage.advance(0.05)
    stage.do(session, session.on_audio(pcm(0.5), stage.now))
    assert session.backlog_samples == 9.5 * SAMPLE_RATE and not stage.events("a", Warning)
    stage.do(session, session.on_audio(pcm(30.0), stage.now))
    assert session.backlog_samples == HELD_LIMIT_S * SAMPLE_RATE and stage.events("a", Warning)


def speak(stage: Stage, session: Session, windows: int, probability: float) -> None:
    for _ in range(windows):
        stage.do(session, session.on_audio(pcm(0.032), stage.now))
        heard = session.gate.take()
        stage.do(session, session.on_speech(heard, [probability], stage.now))  # pyright: ignore[reportArgumentType]
        stage.advance(0.032, 0.032)


def test_speech_over_a_playing_answer_interrupts_it_and_short_noises_do_not():
    stage, session = spoken_stage(mode=TurnMode.SERVER_VAD)
    speak(stage, session, 30, 0.9)
    speak(stage, session, 25, 0.01)
    until_written(stage)
    for _ in range(3):  # a cough of a quarter of a second now and then
        speak(stage, session, 8, 0.9)
        speak(stage, session, 5, 0.01)
    assert len(stage.events("a", SpeechStarted)) == 1 and not stage.events("a", ResponseFlush)
    speak(stage, session, 5, 0.9)
    speak(stage, session, 1, 0.2)  # between two syllables
    speak(stage, session, 5, 0.9)
    assert stage.events("a", ResponseFlush) and len(stage.events("a", SpeechStarted)) == 2
    speak(stage, session, 30, 0.9)
    speak(stage, session, 40, 0.01)
    heard = stage.events("a", ResponseHeard)[0].text
    assert heard and cache(stage).startswith(f"{heard}|(next)echo: next")


def test_the_words_that_interrupted_belong_to_the_turn():
    stage, session = spoken_stage(NullFamily(max_tokens_per_tick=200), mode=TurnMode.SERVER_VAD)
    speak(stage, session, 30, 0.9)
    speak(stage, session, 22, 0.01)
    until_written(stage)
    speak(stage, session, 20, 0.9)
    speak(stage, session, 40, 0.01)
    stage.advance(1.0)
    heard_ms = int(stage.text().split()[-2])
    assert heard_ms >= (20 + 17) * 32  # all of the speech and the silence that ended it


def test_a_short_word_after_the_answer_was_played_is_a_turn():
    stage, session = spoken_stage(mode=TurnMode.SERVER_VAD)
    speak(stage, session, 30, 0.9)
    speak(stage, session, 300, 0.01)
    assert stage.events("a", ResponseAudioDone)
    speak(stage, session, 5, 0.9)
    assert len(stage.events("a", SpeechStarted)) == 2


def until_heard(stage: Stage, session: Session, then: float) -> None:
    """A turn whose hearing takes so long that the next windows of speech (or noise) come meanwhile."""
    speak(stage, session, 30, 0.9)
    stage.can_hear = False
    speak(stage, session, 20, 0.01)
    speak(stage, session, 10, then)


def test_one_who_goes_on_talking_while_the_turn_is_heard_is_not_talked_into():
    stage, session = spoken_stage(mode=TurnMode.SERVER_VAD)
    until_heard(stage, session, 0.9)
    stage.can_hear = True
    speak(stage, session, 10, 0.9)
    assert not stage.events("a", ResponseCreated) and not stage.events("a", Sound)
    speak(stage, session, 40, 0.01)
    assert cache(stage) == f"({STORY}next)echo: {STORY}next"  # one turn, one answer


def test_a_noise_while_the_turn_is_heard_does_not_cost_its_answer():
    stage, session = spoken_stage(Hears([STORY]), mode=TurnMode.SERVER_VAD)
    until_heard(stage, session, 0.9)  # a hum that was taken for speech, and in which nothing is heard
    stage.can_hear = True
    speak(stage, session, 30, 0.01)
    assert stage.text() == f"echo: {STORY}"


def test_two_turns_that_both_ended_before_the_first_was_heard_get_one_answer():
    stage, session = spoken_stage(mode=TurnMode.SERVER_VAD)
    until_heard(stage, session, 0.9)
    speak(stage, session, 30, 0.01)
    stage.can_hear = True
    stage.advance(1.0)
    assert stage.text() == f"echo: {STORY}next"


def test_a_commit_before_the_turn_before_was_heard_ends_that_ones_answer_at_once():
    stage, session = spoken_stage()
    stage.can_hear = False
    commit(stage, session)
    stage.advance(0.1)
    commit(stage, session)
    stage.can_hear = True
    stage.advance(2.0)
    assert [d.reason for d in stage.events("a", ResponseDone)] == ["interrupted", "stop"]
    assert cache(stage) == "|(next)echo: next"


@pytest.mark.parametrize("is_heard", [True, False])
def test_a_cancel_before_the_answer_has_begun_is_kept_for_it_and_for_no_other(is_heard: bool):
    stage, session = spoken_stage(Hears(["one", "two"]))
    stage.can_hear = False
    commit(stage, session)
    if is_heard:
        stage.advance(0.1)  # the hearing runs
    assert len(stage.hearings) == is_heard and not stage.events("a", ResponseCreated)
    assert session.on_cancel(stage.now) == []
    commit(stage, session)  # this one's answer is wanted
    stage.can_hear = True
    stage.advance(5.0)
    assert [d.reason for d in stage.events("a", ResponseDone)] == ["cancelled", "stop"]
    assert stage.text() == "echo: two"
    assert cache(stage).endswith("(one)|(two)echo: two")


def test_a_cancel_while_the_last_words_are_heard_spares_the_client_the_answer():
    stage, session = spoken_stage(mode=TurnMode.SERVER_VAD)
    until_heard(stage, session, 0.01)
    assert stage.hearings
    stage.do(session, session.on_cancel(stage.now))
    stage.can_hear = True
    speak(stage, session, 5, 0.01)
    assert [d.reason for d in stage.events("a", ResponseDone)] == ["cancelled"]
    assert not stage.text() and not stage.events("a", Sound)
    speak(stage, session, 30, 0.9)
    speak(stage, session, 40, 0.01)
    assert stage.text() == "echo: next"


def test_much_sound_is_not_sent_far_ahead_of_its_playback():
    story = STORY * 3
    stage, session = spoken_stage(Hears([story]), max_tokens=400)
    commit(stage, session)
    stage.advance(4.0)
    assert len(stage.text()) == len(story) + 6
    longest_s = 60 * CHAR_S
    assert 1000 * AHEAD_S < sound_ms(stage) < 1000 * (4.0 + AHEAD_S + longest_s)
    stage.advance(20.0)
    assert stage.events("a", ResponseAudioDone)


class Slow(ToneVoice):
    """Two minutes of sound for a clause, as a long row of digits takes."""

    def speak(self, text: str) -> Sound16:
        return np.resize(super().speak(text), 120 * VOICE_RATE)


def test_the_sound_of_a_clause_however_long_is_sent_as_it_is_played():
    stage, session = spoken_stage(Hears(["7 " * 20, "next"]))
    stage.voice = Slow()
    commit(stage, session)
    begin = stage.now
    while not (dones := stage.events("a", ResponseAudioDone)):
        stage.advance(1.0, 1.0)  # as the conductor calls `on_time`
        ahead_s = sound_ms(stage) / 1000 - (stage.now - begin)
        assert ahead_s <= AHEAD_S + 2
        assert ahead_s >= AHEAD_S - 3 or stage.events("a", ResponseAudioDone)  # it never runs dry
    assert (AHEAD_S + 2) * 2 * VOICE_RATE < LIMIT_BYTES
    sounds = stage.events("a", Sound)
    assert sound_ms(stage) == dones[0].duration_ms == 240_000  # "echo:" and the digits
    assert "".join(s.event.text for s in sounds) == stage.text()
    assert stage.said["a"].index(dones[0]) > stage.said["a"].index(sounds[-1])


def test_sound_that_was_held_back_is_forgotten_with_its_answer_and_was_not_heard():
    stage, session = spoken_stage(Hears(["one two three four", "next"]))
    stage.voice = Slow()
    commit(stage, session)
    until_written(stage)
    sent_ms = sound_ms(stage)
    assert 1000 * AHEAD_S <= sent_ms <= 1000 * (AHEAD_S + 1)
    stage.do(session, session.on_cancel(stage.now))
    played(stage, session, 80_000_000)
    stage.advance(30.0)
    assert sound_ms(stage) == sent_ms and not stage.events("a", ResponseAudioDone)
    commit(stage, session)
    stage.advance(1.0)
    assert stage.events("a", ResponseHeard)[0].played_ms == sent_ms


def test_a_client_that_pauses_gets_no_more_sound():
    stage, session = spoken_stage(Hears([STORY * 3]), max_tokens=400)
    commit(stage, session)
    for _ in range(60):
        stage.advance(0.25)
        played(stage, session, 500)
    assert sound_ms(stage) < 1000 * (AHEAD_S + 6)


def test_a_voice_that_fails_ends_the_sound_of_that_answer_only():
    stage, session = spoken_stage()
    stage.can_speak = False
    commit(stage, session)
    stage.advance(0.1)
    (_, utterance) = stage.utterances.pop(0)
    stage.do(session, session.on_spoken(utterance, None, stage.now))
    stage.can_speak = True
    stage.advance(10.0)
    assert [w.code for w in stage.events("a", Warning)] == ["voice_failed"]
    assert stage.text() == f"echo: {STORY}" and not stage.events("a", Sound)
    commit(stage, session)
    stage.advance(5.0)
    assert cache(stage).startswith(f"echo: {STORY}|(next)")  # it could be read
    assert stage.events("a", Sound)


def test_a_voice_that_is_stuck_is_given_up_for_that_answer():
    stage, session = spoken_stage()
    stage.can_speak = False
    commit(stage, session)
    stage.advance(VOICE_LIMIT_S + 1)
    assert [w.code for w in stage.events("a", Warning)] == ["voice_failed"] and not stage.utterances
    commit(stage, session)
    stage.can_speak = True
    stage.advance(3.0)
    assert stage.events("a", Sound)


def test_continuous_mode_only_the_last_ticks_words_can_be_taken_back():
    stage, session = spoken_stage(Hears(["aaa bbb", "ccc ddd"]), mode=TurnMode.CONTINUOUS)
    stage.do(session, session.on_audio(pcm(1.0), stage.now))
    until_written(stage)
    stage.do(session, session.on_audio(pcm(1.0), stage.now))
    until_written(stage, 2)
    num_spoken = sound_ms(stage)
    assert num_spoken == pytest.approx(2 * 13 * 60, abs=2)
    stage.do(session, session.on_cancel(stage.now))
    played(stage, session, 0, answer=2)
    stage.family._texts = ["eee"]  # pyright: ignore[reportAttributeAccessIssue]
    stage.do(session, session.on_audio(pcm(1.0), stage.now))
    stage.advance(3.0)
    assert readable(stage.caches["a"]).endswith("(aaa bbb)echo: aaa bbb|(ccc ddd)|(eee)echo: eee")


def test_continuous_mode_an_answer_begins_while_another_plays_and_both_are_heard():
    stage, session = spoken_stage(Hears([STORY, "ccc"]), mode=TurnMode.CONTINUOUS)
    stage.do(session, session.on_audio(pcm(1.0), stage.now))
    until_written(stage)
    stage.do(session, session.on_audio(pcm(1.0), stage.now))
    until_written(stage, 2)
    stage.advance(12.0)
    texts = [s.event.text for s in stage.events("a", Sound)]
    assert "".join(texts) == f"echo: {STORY}echo: ccc"
    assert [d.response_id for d in stage.events("a", ResponseAudioDone)] == ["a-1", "a-2"]
    assert not stage.events("a", ResponseFlush)


@pytest.mark.parametrize("mode", list(TurnMode))
@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_events_stay_in_order_and_the_engine_holds_what_the_session_thinks(
    mode: TurnMode, seed: int
):
    """Random talk, reports, cancels, updates, a stuck voice, a late engine; the stage checks the cache."""
    rng = random.Random(seed)
    stage = Stage(NullFamily(max_tokens_per_tick=rng.choice([6, 40])), tokens_per_step=rng.choice([2, 16]))
    stage.core = LateCancel(replace(LIMITS, max_session_tokens=1 << 20), tokens_per_step=2)
    session = stage.open(
        mode=mode,
        is_aloud=True,
        voice_rate=VOICE_RATE,
        max_session_tokens=None,
        max_tokens=rng.choice([9, 64]),
    )
    for _ in range(250):
        match rng.randrange(9):
            case 0 | 1:
                stage.do(session, session.on_audio(pcm(rng.uniform(0.0, 1.0)), stage.now))
            case 2 if mode is TurnMode.MANUAL:
                stage.do(session, session.on_commit(stage.now))
            case 2 | 3 if mode is TurnMode.SERVER_VAD:
                speak(stage, session, rng.randint(1, 30), rng.choice([0.01, 0.9, 0.9]))
            case 4 if rng.random() < 0.4:
                stage.do(session, session.on_cancel(stage.now))
            case 5 | 6:
                response_id = f"a-{rng.randint(1, 40)}"
                stage.do(session, session.on_played(response_id, rng.randrange(3000), stage.now))
            case 7 if rng.random() < 0.3:
                stage.do(
                    session, session.on_update(is_aloud=rng.random() < 0.8, instructions=rng.choice("xy"))
                )
            case 8:
                stage.can_speak, stage.can_step = rng.random() < 0.8, rng.random() < 0.8
        stage.advance(rng.uniform(0.0, 0.6))
    grammar = Grammar()
    for item in stage.said["a"]:
        assert not isinstance(item, Close), item.error
        if isinstance(item, Sound):
            grammar.push(item.event.model_dump_json())
            grammar.push(item.pcm)
        else:
            grammar.push(item.model_dump_json())
    assert len(grammar.response_ids) > 1
    stage.can_speak = stage.can_step = True
    stage.advance(30.0)
    assert not session.take_sample(stage.now) and not stage.core.has_work and not stage.utterances
