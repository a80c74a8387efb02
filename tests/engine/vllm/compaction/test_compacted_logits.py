"""Sessions compacted every few turns, against Hugging Face's model cut the same way; float32, W = 64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from engine.models.family import EngineRecipe
from engine.types import Finish
from engine.vllm.settings import VllmSettings
from tests.engine.vllm.compaction.judging import JudgedSession
from tests.engine.vllm.sink_window import recording
from tests.support import tiny_llama

pytestmark = pytest.mark.vllm

W, BLOCK, CHUNK, SLACK = 64, 16, 40, 64
SETTINGS = VllmSettings(
    max_sessions=8,
    max_batch_tokens=256,
    kv_cache_bytes=8 << 20,
    window_tokens=W,
    max_sink_tokens=40,
    max_chunk_tokens=CHUNK,
    compaction_slack_tokens=SLACK,
)
assert_close = partial(torch.testing.assert_close, atol=2e-3, rtol=1e-3)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> EngineRecipe:
    return tiny_llama.build(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def engine_core(recipe: EngineRecipe) -> Iterator:
    from engine.vllm.loading import load

    core = load(recipe, SETTINGS)
    yield core
    core.shutdown()


@pytest.fixture(scope="module", params=["sync"])
def module_stepper(engine_core):
    from engine.vllm.core import SessionCore
    from tests.engine.vllm.stepper import Stepper

    return Stepper(SessionCore(engine_core, None))


@pytest.fixture(scope="module")
def judge(recipe: EngineRecipe) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        recipe.model_dir, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def text(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 250, (length,), generator=generator).tolist())


def feed(
    stepper, sinks: int, tokens: tuple[int, ...], max_tokens: int = 0, keep: int | None = None, name="a"
):
    """One work of session `name`: the work, and the logits of every position it computed."""
    work = replace(stepper.work(name, tokens, max_tokens), num_head_tokens=sinks, keep_tokens=keep)
    engine_core = stepper.core._core
    with recording.hidden_states(engine_core) as recorded:
        assert stepper.run(work) == [Finish.LENGTH if max_tokens else Finish.FED], stepper.final(work)
    with torch.inference_mode():
        logits = recording.runner_of(engine_core).model.compute_logits(torch.cat(recorded))
    return work, logits, [len(step) for step in recorded]


def talk(stepper, session: JudgedSession, sinks: int, num_turns: int, max_tokens: int) -> None:
    """Turns of all lengths; every position's logits must be the judge's."""
    owed: tuple[int, ...] = ()
    for turn in range(num_turns):
        tokens = (*owed, *text(1 + (7 * turn) % (CHUNK - 1), seed=turn))
        work, logits, steps = feed(stepper, sinks, tokens, max_tokens)
        answer = tuple(stepper.tokens(work))
        computed = (*tokens, *answer[:-1])
        assert_close(logits, session.feed(computed, steps))
        owed = answer[-1:]
        final = stepper.final(work)
        assert final.num_kv_tokens == session.length + session.num_evicted
    assert resident(stepper) == session.length


def resident(stepper) -> int:
    (request,) = stepper.scheduler.requests.values()
    return request.num_computed_tokens


@pytest.mark.parametrize("sinks", [0, 16, 20, 40])
@pytest.mark.parametrize("max_tokens", [0, 6])
def test_logits_over_many_compactions(stepper, judge, sinks, max_tokens):
    session = JudgedSession(judge, sinks, W, BLOCK, SLACK)
    talk(stepper, session, sinks, num_turns=40, max_tokens=max_tokens)
    assert session.num_compactions >= 8


def test_without_sinks_a_compacted_session_is_the_uncompacted_one(stepper, judge):
    """All distances stay what they were: nothing but rounding may tell the two apart, at any age."""
    uncompacted = JudgedSession(judge, 0, W, BLOCK, slack=None)
    num_tokens = 0
    for turn in range(60):
        tokens = text(1 + (11 * turn) % CHUNK, seed=turn)
        _, logits, steps = feed(stepper, 0, tokens)
        assert_close(logits, uncompacted.feed(tokens, steps), atol=2e-2)
        num_tokens += len(tokens)
    assert num_tokens > 1000 and resident(stepper) < 3 * W


def test_sinks_come_nearer(stepper, judge):
    """The other way round: with sinks the two do differ, so that the tests above could fail."""
    uncompacted = JudgedSession(judge, 16, W, BLOCK, slack=None)
    worst = 0.0
    for turn in range(20):
        tokens = text(30, seed=turn)
        _, logits, steps = feed(stepper, 16, tokens)
        worst = max(worst, float((logits - uncompacted.feed(tokens, steps)).abs().max()))
    assert worst > 0.1


def test_sessions_of_different_ages_are_moved_in_one_step(stepper, judge):
    names = ("a", "b", "c")
    sessions = {name: JudgedSession(judge, 16, W, BLOCK, SLACK) for name in names}
    engine_core = stepper.core._core
    for turn in range(24):
        given = {name: text(20 + 5 * i, seed=100 * turn + i) for i, name in enumerate(names)}
        works = [replace(stepper.work(n, t), num_head_tokens=16) for n, t in given.items()]
        with recording.hidden_states(engine_core) as recorded:
            assert stepper.run(*works) == [Finish.FED] * 3
        (step,) = recorded
        with torch.inference_mode():
            logits = recording.runner_of(engine_core).model.compute_logits(step)
        start = 0
        for request_id in recording.runner_of(engine_core).input_batch.req_ids:
            name = request_id.split(":")[0]
            expected = sessions[name].feed(given[name])
            assert_close(logits[start : start + len(expected)], expected)
            start += len(expected)
    assert min(session.num_compactions for session in sessions.values()) >= 3


def test_a_work_longer_than_window_and_slack_is_taken_in_by_turns(stepper, judge):
    sinks = 20
    session = JudgedSession(judge, sinks, W, BLOCK, SLACK)
    for turn in range(3):
        tokens = text(5 * SLACK + 7, seed=turn)
        work, logits, _ = feed(stepper, sinks, tokens)
        assert stepper.of(work) == [stepper.final(work)]
        expected = []
        for start in range(0, len(tokens), SLACK):
            piece = tokens[start : start + SLACK]
            expected.append(session.feed(piece, [CHUNK, len(piece) - CHUNK] if len(piece) > CHUNK else None))
        assert_close(logits, torch.cat(expected))
        assert stepper.final(work).num_kv_tokens == (turn + 1) * len(tokens)


def test_an_answer_longer_than_a_turn_goes_on_in_the_next(stepper, judge):
    session = JudgedSession(judge, 16, W, BLOCK, SLACK)
    prompt = text(30)
    work, logits, _ = feed(stepper, 16, prompt, max_tokens=4 * SLACK)
    answer = stepper.tokens(work)
    assert len(answer) == 4 * SLACK and stepper.final(work).num_kv_tokens == 30 + 4 * SLACK - 1
    computed, expected = [*prompt, *answer[:-1]], []
    while computed:  # a turn computes up to SLACK tokens
        turn, computed = computed[:SLACK], computed[SLACK:]
        sizes = [len(prompt), *[1] * (SLACK - len(prompt))] if not expected else [1] * len(turn)
        expected.append(session.feed(turn, sizes))
    assert_close(logits, torch.cat(expected))
    assert torch.equal(logits[29:].argmax(-1), torch.tensor(answer))


@pytest.mark.parametrize("num_before", [1, 5, 20])
@pytest.mark.parametrize("num_forgotten", [1, 9, 30])
def test_what_was_forgotten_was_never_decoded(stepper, judge, num_before, num_forgotten):
    """Before and after the session's gap opens: the tokens that follow are computed as if they followed what
    was kept, and everything in the shortened window is really there."""
    sinks = 20
    session = JudgedSession(judge, sinks, W, BLOCK, SLACK)
    for turn in range(num_before):
        tokens = text(25, seed=turn)
        _, logits, steps = feed(stepper, sinks, tokens)
        session.feed(tokens, steps)
    work, logits, steps = feed(stepper, sinks, text(10, seed=99), max_tokens=31)
    answer = tuple(stepper.tokens(work))
    assert_close(logits, session.feed((*text(10, seed=99), *answer[:-1]), steps))
    done = stepper.final(work).num_kv_tokens
    session.forget(done - num_forgotten)
    for turn in range(6):
        tokens = text(20, seed=50 + turn)
        work, logits, steps = feed(stepper, sinks, tokens, keep=done - num_forgotten if turn == 0 else None)
        assert_close(logits, session.feed(tokens, steps))
    assert (
        stepper.final(work).num_kv_tokens
        == done - num_forgotten + 120
        == session.length + session.num_evicted
    )
