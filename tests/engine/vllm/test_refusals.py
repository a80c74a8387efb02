"""Works that cannot run: each is refused alone, before vLLM would stop for everybody."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.types import Features, Finish, Sampling
from engine.vllm.requests import EngineCoreRequest

pytestmark = pytest.mark.vllm

PROMPT = tuple(range(10, 30))
NOT_SAMPLABLE = Sampling(temperature=-1.0)
MISPLACED = Features(offset=19, num_tokens=4, tensors={"audio_features": None})
UNKNOWN_TENSORS = Features(offset=0, num_tokens=4, tensors={"pixels": None})


@pytest.fixture
def bystander(stepper):
    """A session in the middle of its answer, which must come out as if it were alone."""
    alone = stepper.work("alone", PROMPT, 30)
    stepper.run(alone)
    work = stepper.work("bystander", PROMPT, 30)
    stepper.submit(work)
    stepper.step()
    stepper.step()
    yield work
    stepper.step_until(lambda: stepper.final(work))
    assert stepper.final(work).finish is Finish.LENGTH
    assert stepper.tokens(work) == stepper.tokens(alone)


BAD_WORKS = {
    "empty": (dict(tokens=()), "at least one token"),
    "negative token": (dict(tokens=(5, -1)), "vocabulary of 256"),
    "token past the vocabulary": (dict(tokens=(5, 256)), "vocabulary of 256"),
    "negative max_tokens": (dict(tokens=(5,), max_tokens=-1), "must not be negative"),
    "too long": (dict(tokens=(5,) * 256), "beyond 255 tokens: 0 are held, 256 come in, 0 may be decoded"),
    "too long an answer": (dict(tokens=(5,), max_tokens=255), "1 come in, 255 may be decoded"),
    "bad sampling": (dict(tokens=(5,), sampling=NOT_SAMPLABLE), "temperature must be non-negative"),
    "features past the end": (dict(tokens=PROMPT, features=[MISPLACED]), "ends at token 23 of 20"),
    "features out of order": (
        dict(tokens=PROMPT, features=[replace(MISPLACED, offset=8), replace(MISPLACED, offset=4)]),
        "not in order",
    ),
    "features of no size": (dict(tokens=PROMPT, features=[replace(MISPLACED, num_tokens=0)]), "has 0 tokens"),
    "features of another model": (
        dict(tokens=PROMPT, features=[UNKNOWN_TENSORS]),
        "no features named pixels",
    ),
    "features without tensors": (
        dict(tokens=PROMPT, features=[replace(MISPLACED, offset=0, tensors={})]),
        "no tensors",
    ),
}


@pytest.mark.parametrize("name", BAD_WORKS)
@pytest.mark.parametrize("is_new", [True, False], ids=["new", "parked"])
def test_a_bad_work_ends_its_session_only(stepper, bystander, name, is_new):
    arguments, reason = BAD_WORKS[name]
    if not is_new:
        stepper.run(stepper.work("bad", (40, 41)))
    work = stepper.work("bad", **arguments)
    stepper.submit(work)
    result = stepper.final(work)
    assert result.finish is Finish.REFUSED
    assert result.num_kv_tokens == 0
    assert result.token_ids == ()
    assert reason.replace("0 are held", "0 are held" if is_new else "2 are held") in result.error
    assert "bad" not in stepper.core._sessions


def test_a_second_work_while_one_runs_ends_the_session(stepper, bystander):
    first = stepper.work("a", PROMPT, 20)
    stepper.submit(first)
    stepper.step()
    second = stepper.work("a", (40,), 2)
    stepper.submit(second)
    assert stepper.final(second).finish is Finish.REFUSED
    assert f"Work {first.seq} of this session is not finished" in stepper.final(second).error
    stepper.step()
    assert stepper.final(first) is None
    again = stepper.work("a", (40,), 2)
    stepper.submit(again)
    assert "Generation 0 of this session has ended" in stepper.final(again).error


def test_a_stale_generation_is_refused_and_the_new_one_lives(stepper, bystander):
    stepper.run(stepper.work("a", PROMPT, generation=2))
    late = stepper.work("a", (40,), 2, generation=1)
    stepper.submit(late)
    assert stepper.final(late).finish is Finish.REFUSED
    assert stepper.run(stepper.work("a", (40,), 2, generation=2)) == [Finish.LENGTH]


def test_one_session_too_many_is_refused_and_room_is_reused(stepper):
    limit = stepper.core.limits.max_sessions
    works = [stepper.work(f"s{i}", (20 + i,)) for i in range(limit)]
    assert stepper.run(*works) == [Finish.FED] * limit
    extra = stepper.work("extra", PROMPT, 2)
    stepper.submit(extra)
    assert f"All {limit} session slots are taken" in stepper.final(extra).error
    stepper.end("s3")
    assert stepper.run(stepper.work("next", PROMPT, 2)) == [Finish.LENGTH]


def test_a_pool_that_cannot_hold_one_more_whole_session_refuses_it(stepper, monkeypatch):
    limits = replace(stepper.core.limits, num_kv_blocks=stepper.core.limits.blocks_per_session)
    monkeypatch.setattr(stepper.core, "limits", limits)
    stepper.run(stepper.work("a", PROMPT))
    extra = stepper.work("b", PROMPT)
    stepper.submit(extra)
    assert "cannot hold one more whole session" in stepper.final(extra).error


def request(request_id: str, tokens: list[int], sampling_params) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=tokens,
        mm_features=None,
        sampling_params=sampling_params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        resumable=True,
    )


@pytest.mark.parametrize("tokens", [(), (5,) * 400], ids=["empty", "too long"])
@pytest.mark.parametrize("is_new", [True, False], ids=["new", "parked"])
def test_what_slips_past_the_first_check_is_stopped_in_the_scheduler(
    stepper, bystander, monkeypatch, tokens, is_new
):
    if not is_new:
        stepper.run(stepper.work("bad", (40, 41)))
    monkeypatch.setattr("engine.vllm.core.unfit", lambda *_: None)
    work = stepper.work("bad", tokens, 2)
    stepper.submit(work)
    stepper.step()
    assert stepper.final(work).finish is Finish.REFUSED
    assert "bad" not in stepper.core._sessions


def exhaust(stepper, monkeypatch, num_blocks_left: int) -> list:
    """Take all blocks but a few out of the pool, as a wrong reservation would."""
    pool = stepper.core._pool
    return pool.get_new_blocks(pool.get_num_free_blocks() - num_blocks_left)


def test_a_preempted_session_ends_and_the_others_go_on(stepper, monkeypatch):
    older, younger = stepper.work("older", PROMPT, 60), stepper.work("younger", PROMPT, 60)
    stepper.submit(older, younger)
    stepper.step_until(lambda: len(stepper.tokens(younger)) == 2)
    taken = exhaust(stepper, monkeypatch, 1)
    try:
        stepper.step_until(lambda: stepper.final(older) and stepper.final(younger))
    finally:
        stepper.core._pool.free_blocks(taken)
    assert stepper.final(older).finish is Finish.LENGTH
    assert len(stepper.tokens(older)) == 60
    assert stepper.final(younger).finish is Finish.REFUSED
    assert "ran out of blocks" in stepper.final(younger).error


def test_a_session_that_can_never_be_scheduled_ends_instead_of_blocking_the_line(stepper, monkeypatch):
    taken = exhaust(stepper, monkeypatch, 2)
    try:
        stuck, small = stepper.work("stuck", (5,) * 100, 2), stepper.work("small", PROMPT, 2)
        finishes = stepper.run(stuck, small)
    finally:
        stepper.core._pool.free_blocks(taken)
    assert finishes == [Finish.REFUSED, Finish.LENGTH]
    assert "No room" in stepper.final(stuck).error
