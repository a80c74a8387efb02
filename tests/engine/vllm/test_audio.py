"""Audio chunks that stream into one session, as features inside its tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from engine.types import SAMPLE_RATE, Features, Finish, Hearing, TurnMode, Work

pytestmark = pytest.mark.vllm

MODE = TurnMode.CONTINUOUS


@pytest.fixture(scope="module")
def module_stepper(engine_core):
    """Only the real model has an encoder."""
    from engine.vllm.core import SessionCore
    from tests.engine.vllm.stepper import Stepper

    return Stepper(SessionCore(engine_core, "audio"))


def sound(seed: int, seconds: float) -> np.ndarray:
    rng = np.random.default_rng(seed)
    time_s = np.arange(int(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    pitch = 200 + 600 * rng.random()
    return (0.3 * np.sin(2 * np.pi * pitch * time_s) + 0.05 * rng.standard_normal(len(time_s))).astype(
        np.float32
    )


def turn(family, ear, audio: np.ndarray, session: str = "a") -> tuple[tuple[int, ...], tuple[Features, ...]]:
    """One tick's turn as a session would send it: template, audio, template."""
    (intake,) = family.hear([Hearing(session, ear, audio, is_final=True)])
    opening = family.open_turn(MODE)
    tokens = (*opening, *intake.token_ids, *family.close_turn(MODE))
    return tokens, tuple(replace(item, offset=item.offset + len(opening)) for item in intake.features)


def test_chunks_into_one_session_equal_one_request_with_all(stepper, family):
    ear, tokens, features, answered = family.new_ear(), family.head("be kind"), (), None
    streamed: list[int] = []
    all_tokens: list[int] = []
    all_features: list[Features] = []
    for i in range(6):
        new_tokens, new_features = turn(family, ear, sound(i, 1.0))
        chunk = (*tokens, *new_tokens)
        features = tuple(replace(item, offset=item.offset + len(tokens)) for item in new_features)
        all_features += [replace(item, offset=item.offset + len(all_tokens)) for item in features]
        all_tokens += chunk
        answered = stepper.work("streamed", chunk, 3, features=features)
        assert stepper.run(answered) == [Finish.LENGTH]
        streamed = stepper.tokens(answered)
        all_tokens += streamed[:-1]
        tokens = (streamed[-1], *family.close_answer(MODE))
    offline = stepper.work("offline", all_tokens[: len(all_tokens) - 2], 3, features=all_features)
    assert stepper.run(offline) == [Finish.LENGTH]
    assert stepper.tokens(offline) == streamed


def test_the_answer_depends_on_the_audio(stepper, family):
    answers = set()
    for i in range(4):
        tokens, features = turn(family, family.new_ear(), sound(i, 1.0))
        work = stepper.work(f"s{i}", (*family.head(""), *tokens), 6, features=_shift(features, 2))
        stepper.run(work)
        answers.add(tuple(stepper.tokens(work)))
    assert len(answers) > 1


def test_sessions_with_audio_side_by_side_answer_as_each_alone(stepper, family):
    def works(prefix: str) -> list[Work]:
        made = []
        for i in range(4):
            tokens, features = turn(family, family.new_ear(), sound(10 + i, 0.5 + 0.3 * i))
            made.append(
                stepper.work(f"{prefix}{i}", (*family.head("x"), *tokens), 5, features=_shift(features, 3))
            )
        return made

    alone, together = works("alone"), works("together")
    for work in alone:
        stepper.run(work)
    stepper.run(*together)
    assert [stepper.tokens(w) for w in together] == [stepper.tokens(w) for w in alone]


def test_one_item_may_be_split_over_steps(stepper, family):
    """The batch holds 64 tokens; the audio lies across the border of two."""
    tokens, features = turn(family, family.new_ear(), sound(3, 1.0))
    filler = tuple(20 + i % 100 for i in range(60))
    split = stepper.work("split", (*filler, *tokens), 4, features=_shift(features, 60))
    assert stepper.run(split) == [Finish.LENGTH]
    fed = stepper.work("chunks", filler)
    stepper.run(fed)
    chunks = stepper.work("chunks", tokens, 4, features=features)
    stepper.run(chunks)
    assert stepper.tokens(split) == stepper.tokens(chunks)


@pytest.mark.parametrize("when", ["waiting", "encoding", "parked"])
def test_ending_a_session_with_audio_frees_its_encoder_entries(stepper, family, when):
    tokens, features = turn(family, family.new_ear(), sound(5, 1.0))
    work = stepper.work("a", (*tokens, *(30,) * 100), 4, features=features)
    stepper.submit(work)
    if when == "encoding":
        stepper.step()
        stepper.step()
    elif when == "parked":
        stepper.step_until(lambda: stepper.final(work))
    stepper.end("a")
    stepper.run_idle()
    stepper.check_empty()
    cache = stepper.scheduler.encoder_cache_manager
    assert not any(cache.cached.values())
    assert cache.num_freeable_slots == cache.cache_size


def test_audio_that_is_not_a_number_is_refused(stepper, family):
    tokens, features = turn(family, family.new_ear(), sound(5, 1.0))
    item, *rest = features
    mel = item.tensors["audio_features"].clone()
    mel[0, 3, 5] = float("nan")
    bad = replace(item, tensors={**item.tensors, "audio_features": mel})
    work = stepper.work("a", tokens, 4, features=[bad, *rest])
    stepper.submit(work)
    assert "audio_features holds values that are not finite" in stepper.final(work).error


def test_hearing_keeps_less_than_a_token_and_forgets_it_at_the_end(family):
    ear = family.new_ear()
    assert family.hear([Hearing("a", ear, sound(1, 0.1), False)])[0].token_ids == ()
    (intake,) = family.hear([Hearing("a", ear, sound(1, 0.1), False)])  # 200 ms by now, a token is 160
    assert len(intake.token_ids) == 1
    assert len(ear.rest) == 0.04 * SAMPLE_RATE
    (intake,) = family.hear([Hearing("a", ear, sound(1, 0.01), True)])
    assert len(intake.token_ids) == 1
    assert len(ear.rest) == 0
    assert family.hear([Hearing("a", ear, np.zeros(0, np.float32), True)])[0].features == ()


def _shift(features: tuple[Features, ...], offset: int) -> tuple[Features, ...]:
    return tuple(replace(item, offset=item.offset + offset) for item in features)
