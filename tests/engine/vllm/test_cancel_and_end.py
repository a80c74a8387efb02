"""Cancelling and ending in every state a session can be in. The `stepper` fixture checks what is left."""

from __future__ import annotations

import pytest

from engine.types import Finish
from engine.vllm.scheduler import AsyncParkingScheduler, RequestStatus

pytestmark = pytest.mark.vllm

PROMPT = tuple(range(10, 30))
LONG = tuple(i * 3 % 200 + 10 for i in range(150))  # three steps of 64 tokens


def status(stepper, session: str) -> RequestStatus:
    return stepper.core._sessions[session].request.status


def into_state(stepper, state: str):
    """Bring session "a" into a state; returns its unfinished work, if any."""
    if state == "waiting":
        work = stepper.work("a", LONG, 8)
        stepper.submit(work)
        assert status(stepper, "a") == RequestStatus.WAITING
    elif state == "resumed":
        stepper.run(stepper.work("a", PROMPT))
        work = stepper.work("a", LONG, 8)
        stepper.submit(work)
        assert status(stepper, "a") == RequestStatus.WAITING
    elif state == "prefilling":
        work = stepper.work("a", LONG, 8)
        stepper.submit(work)
        stepper.step()
        assert status(stepper, "a") == RequestStatus.RUNNING
        assert stepper.of(work) == []
    elif state == "decoding":
        work = stepper.work("a", PROMPT, 100)
        stepper.submit(work)
        stepper.step_until(lambda: len(stepper.tokens(work)) == 3)
    else:
        assert state == "parked"
        stepper.run(stepper.work("a", PROMPT, 3))
        work = None
        assert status(stepper, "a") == RequestStatus.WAITING_FOR_STREAMING_REQ
    return work


@pytest.mark.parametrize("state", ["waiting", "resumed", "prefilling", "decoding", "parked"])
def test_end_frees_all_and_tells_nothing(stepper, state):
    other = stepper.work("other", PROMPT, 12)
    stepper.submit(other)
    work = into_state(stepper, state)
    before = len(stepper.of(work)) if work else 0
    stepper.end("a")
    assert "a" not in stepper.core._sessions
    stepper.step_until(lambda: stepper.final(other))
    assert len(stepper.tokens(other)) == 12
    if work is not None:
        assert len(stepper.of(work)) == before
    stepper.end("other")
    stepper.run_idle()
    stepper.check_empty()


def test_end_of_what_is_not_known_does_nothing(stepper):
    stepper.run(stepper.work("a", PROMPT))
    stepper.end("nobody")
    stepper.end("a", generation=3)
    assert stepper.run(stepper.work("a", (40,), 2)) == [Finish.LENGTH]


def test_a_work_after_the_end_brings_no_ghost_back(stepper):
    stepper.run(stepper.work("a", PROMPT))
    stepper.end("a")
    late = stepper.work("a", (40,), 2)
    stepper.submit(late)
    assert stepper.final(late).finish is Finish.REFUSED
    assert stepper.core.stats().num_sessions == 0
    assert stepper.run(stepper.work("a", (40,), 2, generation=1)) == [Finish.LENGTH]


@pytest.mark.parametrize("state", ["waiting", "resumed", "prefilling"])
def test_a_cancel_before_the_answer_still_takes_the_tokens_in(stepper, state):
    work = into_state(stepper, state)
    stepper.cancel("a")
    stepper.step_until(lambda: stepper.final(work))
    final = stepper.final(work)
    assert final.finish is Finish.CANCELLED
    assert stepper.tokens(work) == []
    held = len(LONG) + (len(PROMPT) if state == "resumed" else 0)
    assert final.num_kv_tokens == held
    follow_up, same = stepper.work("a", (40, 41), 6), (*PROMPT, *LONG) if state == "resumed" else LONG
    fresh = stepper.work("b", (*same, 40, 41), 6)
    stepper.run(follow_up, fresh)
    assert stepper.tokens(follow_up) == stepper.tokens(fresh)


def test_a_cancelled_answer_ends_at_once_and_the_session_goes_on(stepper):
    work = into_state(stepper, "decoding")
    stepper.cancel("a")
    final = stepper.final(work)  # no further step was needed
    assert final.finish is Finish.CANCELLED
    assert final.token_ids == ()
    said = stepper.tokens(work)
    assert len(said) == 3
    assert final.num_kv_tokens == len(PROMPT) + 2  # the last token is not in the cache
    assert status(stepper, "a") == RequestStatus.WAITING_FOR_STREAMING_REQ
    follow_up = stepper.work("a", (said[-1], 40, 41), 6)
    fresh = stepper.work("b", (*PROMPT, *said, 40, 41), 6)
    stepper.run(follow_up, fresh)
    assert stepper.tokens(follow_up) == stepper.tokens(fresh)


def test_a_cancelled_take_in_is_cancelled_not_fed(stepper):
    work = stepper.work("a", PROMPT)
    stepper.submit(work)
    stepper.cancel("a")
    stepper.step_until(lambda: stepper.final(work))
    assert stepper.final(work).finish is Finish.CANCELLED
    assert stepper.final(work).num_kv_tokens == len(PROMPT)


def test_a_cancel_that_comes_too_late_changes_nothing(stepper):
    work = stepper.work("a", PROMPT, 3)
    stepper.run(work)
    stepper.cancel("a")
    stepper.cancel("nobody")
    assert stepper.final(work).finish is Finish.LENGTH
    assert stepper.run(stepper.work("a", (40,), 4)) == [Finish.LENGTH]  # nor does it stay pending


@pytest.mark.parametrize("num_steps", range(1, 8))
def test_a_cancel_at_any_step_gives_one_final_result(stepper, num_steps):
    work = stepper.work("a", LONG, 4)
    stepper.submit(work)
    for _ in range(num_steps):
        stepper.step()
    stepper.cancel("a")
    stepper.cancel("a")
    stepper.run_idle()
    assert stepper.final(work).finish in (Finish.CANCELLED, Finish.LENGTH)


def test_end_right_after_cancel(stepper):
    for state in ("waiting", "prefilling", "decoding"):
        stepper.core._gone.clear()
        into_state(stepper, state)
        stepper.cancel("a")
        stepper.end("a")
        stepper.run_idle()
        stepper.check_empty()
        stepper.results.clear()


def test_a_step_in_flight_for_a_cancelled_turn_is_dropped(stepper):
    """Asynchronous scheduling only: the token of the step under way must reach nobody."""
    if not isinstance(stepper.scheduler, AsyncParkingScheduler):
        pytest.skip("no step is ever in flight")
    work = into_state(stepper, "decoding")
    request = stepper.core._sessions["a"].request
    assert request.num_in_flight_tokens > 0
    assert stepper.core._core.batch_queue
    stepper.cancel("a")
    assert request.num_stale_output_tokens == request.num_in_flight_tokens
    said = stepper.tokens(work)
    follow_up = stepper.work("a", (said[-1], 40, 41), 4)  # even before that step has returned
    fresh = stepper.work("b", (*PROMPT, *said, 40, 41), 4)
    stepper.run(follow_up, fresh)
    assert stepper.tokens(follow_up) == stepper.tokens(fresh)
    assert stepper.tokens(work) == said
