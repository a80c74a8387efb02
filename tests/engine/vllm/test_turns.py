"""What a work does: tokens in, tokens out, and how it says that it ended."""

from __future__ import annotations

import pytest

from engine.types import Finish, Sampling

pytestmark = pytest.mark.vllm

PROMPT = tuple(range(10, 30))


def greedy(stepper, session: str, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    work = stepper.work(session, prompt, num_tokens)
    assert stepper.run(work) == [Finish.LENGTH]
    return stepper.tokens(work)


def test_an_answer_comes_token_by_token_and_ends_at_max_tokens(stepper):
    work = stepper.work("a", PROMPT, max_tokens=5)
    assert stepper.run(work) == [Finish.LENGTH]
    results = stepper.of(work)
    assert [len(r.token_ids) for r in results] == [1, 1, 1, 1, 1]
    assert [r.finish for r in results] == [None] * 4 + [Finish.LENGTH]
    assert [r.num_kv_tokens for r in results] == [20, 21, 22, 23, 24]
    assert {(r.session_id, r.generation, r.seq, r.error) for r in results} == {("a", 0, work.seq, None)}


def test_zero_tokens_only_takes_in(stepper):
    work = stepper.work("a", PROMPT)
    assert stepper.run(work) == [Finish.FED]
    (result,) = stepper.of(work)
    assert result.token_ids == ()
    assert result.num_kv_tokens == len(PROMPT)


def test_a_chunk_longer_than_a_batch_is_taken_in_over_several_steps(stepper):
    prompt = tuple(i % 200 + 10 for i in range(150))
    work = stepper.work("a", prompt, max_tokens=2)
    assert stepper.run(work) == [Finish.LENGTH]
    assert [r.num_kv_tokens for r in stepper.of(work)] == [150, 151]


def test_a_stop_token_ends_the_answer_and_is_not_reported(stepper):
    answer = greedy(stepper, "plain", PROMPT, 8)
    stop = answer[4]
    first = answer.index(stop)
    work = stepper.work("a", PROMPT, 8, sampling=Sampling(stop_token_ids=(stop,)))
    assert stepper.run(work) == [Finish.STOP]
    assert stepper.tokens(work) == answer[:first]
    final = stepper.final(work)
    assert final.num_kv_tokens == len(PROMPT) + first  # all that was reported is in the cache


def test_a_stop_at_the_first_token_leaves_the_session_usable(stepper):
    first = greedy(stepper, "plain", PROMPT, 1)[0]
    sampling = Sampling(stop_token_ids=(first,))
    work = stepper.work("a", PROMPT, 8, sampling=sampling)
    assert stepper.run(work) == [Finish.STOP]
    assert stepper.tokens(work) == []
    assert stepper.final(work).num_kv_tokens == len(PROMPT)
    assert stepper.run(stepper.work("a", (40, 41), 3)) == [Finish.LENGTH]


def test_an_answer_in_parts_equals_one_in_a_piece(stepper):
    whole = greedy(stepper, "whole", PROMPT, 24)
    parts: list[int] = []
    tokens = PROMPT
    for _ in range(6):
        work = stepper.work("parts", tokens, 4)
        assert stepper.run(work) == [Finish.LENGTH]
        parts += stepper.tokens(work)
        tokens = (parts[-1],)  # not in the cache yet: the next work begins with it
    assert parts == whole
    assert stepper.final(work).num_kv_tokens == len(PROMPT) + 23


def test_a_prompt_in_chunks_equals_one_in_a_piece(stepper):
    prompt = tuple(i * 7 % 200 + 10 for i in range(90))
    whole = greedy(stepper, "whole", prompt, 12)
    for start in range(0, 90, 18):
        work = stepper.work("chunks", prompt[start : start + 18], 12 if start == 72 else 0)
        assert stepper.run(work) == [Finish.FED if start < 72 else Finish.LENGTH]
    assert stepper.tokens(work) == whole


def test_several_turns_equal_the_same_conversation_at_once(stepper):
    first = stepper.work("a", PROMPT, 5)
    stepper.run(first)
    answer = stepper.tokens(first)
    second = stepper.work("a", (answer[-1], 50, 51, 52), 6)
    stepper.run(second)
    assert stepper.tokens(second) == greedy(stepper, "b", (*PROMPT, *answer, 50, 51, 52), 6)


def test_two_sessions_side_by_side_answer_as_each_alone(stepper):
    prompts = {"a": PROMPT, "b": tuple(range(60, 95))}
    alone = {name: greedy(stepper, f"{name} alone", prompt, 10) for name, prompt in prompts.items()}
    works = {name: stepper.work(name, prompt, 10) for name, prompt in prompts.items()}
    stepper.submit(works["a"])
    stepper.step()
    stepper.step()
    stepper.submit(works["b"])  # joins in the middle of the other's answer
    stepper.step_until(lambda: all(stepper.final(work) for work in works.values()))
    assert {name: stepper.tokens(work) for name, work in works.items()} == alone


def test_sampling_with_a_seed_repeats(stepper):
    sampling = Sampling(temperature=0.9, top_p=0.95, top_k=40, repetition_penalty=1.1, seed=7)
    works = [stepper.work(name, PROMPT, 12, sampling=sampling) for name in ("a", "b")]
    assert stepper.run(*works) == [Finish.LENGTH] * 2
    assert stepper.tokens(works[0]) == stepper.tokens(works[1])


def test_a_new_generation_starts_from_nothing(stepper):
    old = stepper.work("a", PROMPT, 4)
    stepper.run(old)
    new = stepper.work("a", (33, 34), 6, generation=1)
    assert stepper.run(new) == [Finish.LENGTH]
    assert stepper.core.stats().num_sessions == 1
    assert stepper.tokens(new) == greedy(stepper, "b", (33, 34), 6)
    assert stepper.final(new).num_kv_tokens == 2 + 5


def test_a_session_may_fill_its_length_to_the_last_token(stepper):
    limit = stepper.core.limits.max_session_tokens
    prompt = tuple(i % 200 + 10 for i in range(limit - 5))
    answered, fed = stepper.work("a", prompt, 5), stepper.work("b", (*prompt, 1, 1, 1, 1, 1))
    assert stepper.run(answered, fed) == [Finish.LENGTH, Finish.FED]
    assert stepper.final(fed).num_kv_tokens == limit
