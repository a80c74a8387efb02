"""Sessions without end in the tiny audio model's engine: what they hold, what they refuse, how they end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.types import Finish, Sampling, Work
from tests.engine.vllm.compaction.compacted import HEAD, SLACK, compacted
from tests.engine.vllm.sink_window import recording
from tests.engine.vllm.sink_window.windowed import BLOCK, W, begin, more, prompt
from tests.engine.vllm.test_audio import sound, turn

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def engine_core(family) -> Iterator:
    from engine.vllm.loading import load

    core = load(family.engine_recipe(), compacted())
    yield core
    core.shutdown()


def request_of(stepper, name: str) -> Any:
    (request,) = (r for key, r in stepper.scheduler.requests.items() if key.startswith(f"{name}:"))
    return request


def only_sync(stepper) -> None:
    if stepper.core._core.batch_queue is not None:
        pytest.skip("the model on paper has no encoder and no keys")


def test_a_session_has_no_end_and_its_record_no_age(stepper):
    """20 times the model's positions; what each chunk sends to the worker stops growing at once."""
    assert stepper.core.limits.max_session_tokens is None
    stepper.run(begin(stepper, "a"))
    sizes, owed = [], ()
    for number in range(400):
        work = replace(more(stepper, "a", 50, 4, number), token_ids=(*owed, *prompt(50, number)))
        stepper.submit(work)
        request = request_of(stepper, "a")
        (manager,) = stepper.scheduler.kv_cache_manager.coordinator.single_type_managers
        sizes.append(
            (
                len(request.prompt_token_ids),
                request.num_tokens,
                len(manager.req_to_blocks[request.request_id]),
                len(request.mm_features),
                len(request.output_token_ids),
            )
        )
        stepper.step_until(lambda work=work: stepper.final(work))
        owed = tuple(stepper.tokens(work)[-1:])
    assert stepper.final(work).num_kv_tokens > 20 * 1024
    bound = stepper.scheduler.max_model_len
    assert bound < 300
    for early, late in zip(zip(*sizes[20:120], strict=True), zip(*sizes[-100:], strict=True), strict=True):
        assert max(late) <= max(early)
    assert max(size[0] for size in sizes) < bound


def test_thirty_two_sessions_of_different_phases_pass_any_length(stepper):
    """In CI six of them, and 4 times the model's positions; bench and on_device.py have them all."""
    names = [f"s{i}" for i in range(6 if stepper.core._core.batch_queue is None else 4)]
    ages, working = dict.fromkeys(names, 0), {}
    for number in range(3000):
        for i, name in enumerate(names):
            if name not in working:
                work = replace(more(stepper, name, 20 + 3 * i, 5 * (i % 2), number), num_head_tokens=3 * i)
                stepper.submit(work)
                working[name] = work
        stepper.step()
        for name, work in list(working.items()):
            if stepper.final(work) is not None:
                assert stepper.final(work).finish in (Finish.FED, Finish.LENGTH), stepper.final(work).error
                ages[name] = stepper.final(working.pop(name)).num_kv_tokens
        if min(ages.values()) > 4096:
            break
    assert min(ages.values()) > 4096


def test_audio_over_many_compactions_is_what_a_young_session_computes(stepper, family):
    """Without sinks all that counts is what the window shows: a session that begins a few windows before the
    end computes the same, though nothing of it was ever moved. Its audio lies half out of the window."""
    only_sync(stepper)
    ear, ticks, length = family.new_ear(), [], 0
    while len(ticks) < 90:
        tokens, features = turn(family, ear, sound(len(ticks), 0.5 + 0.25 * (len(ticks) % 5)))
        filler = prompt(-(len(tokens) + length) % BLOCK, len(ticks)) if len(ticks) % 10 == 9 else ()
        ticks.append(((*tokens, *filler), features))
        length += len(ticks[-1][0])
    young_from = 60  # a multiple of 10: there the old session's length is a multiple of the block size
    last: dict[str, torch.Tensor] = {}
    for name, first in (("old", 0), ("young", young_from)):
        for tokens, features in ticks[first:]:
            with recording.hidden_states(stepper.core._core) as recorded:
                work = replace(stepper.work(name, tokens, features=features), num_head_tokens=0)
                assert stepper.run(work) == [Finish.FED], stepper.final(work)
            last[name] = torch.cat(recorded)
        cache = stepper.scheduler.encoder_cache_manager
        assert not cache.cached and cache.num_free_slots == cache.cache_size
    runner = recording.runner_of(stepper.core._core)
    owners = {identifier.rsplit(":", 1)[0] for identifier in runner.encoder_cache}
    assert len(owners) <= 1  # the last work's, which the next step drops
    assert stepper.core._sessions["old"].num_evicted > 5 * SLACK
    torch.testing.assert_close(last["old"], last["young"], atol=2e-2, rtol=1e-3)


def test_items_in_pieces_of_one_work_have_keys_of_their_own(stepper, family, monkeypatch):
    """A key that comes back at once would bring back what was heard then: runner V2 does not encode again."""
    only_sync(stepper)
    ear, tokens, features = family.new_ear(), (), ()
    for number in range(6):
        one, items = turn(family, ear, sound(number, 1.5))
        features += tuple(replace(item, offset=item.offset + len(tokens)) for item in items)
        tokens += one
    assert len(tokens) > SLACK  # so the work is taken in piece by piece
    keys: list[str] = []
    builder = stepper.core._builder
    make = builder._feature

    def noted(item, identifier):
        keys.append(identifier)
        return make(item, identifier)

    monkeypatch.setattr(builder, "_feature", noted)
    work = replace(stepper.work("a", tokens, features=features), num_head_tokens=0)
    assert stepper.run(work) == [Finish.FED], stepper.final(work)
    assert len(keys) == len(features) == len(set(keys))


@pytest.mark.parametrize("size", [W - 1, W, W + 1, SLACK, SLACK + 1, 2 * (W + SLACK), 900])
def test_a_chunk_of_any_length_is_taken_in(stepper, size):
    stepper.run(begin(stepper, "a", HEAD))
    for number in range(3):
        work = more(stepper, "a", size, 3, number)
        assert stepper.run(work) == [Finish.LENGTH]
        assert len(stepper.tokens(work)) == 3
    assert stepper.final(work).num_kv_tokens == HEAD + 3 * (size + 2)


def test_an_answer_cut_off_between_its_turns_ends_where_it_was(stepper):
    for moment in (0, 1, 2, 5, 33, 34, 35, 36, 37, 60, 97, 98, 99, 100, 101, 102):
        name = f"a{moment}"
        work = begin(stepper, name, 30, 3 * SLACK)
        stepper.submit(work)
        for _ in range(moment):
            stepper.step()
        stepper.cancel(name)
        stepper.step_until(lambda work=work: stepper.final(work))
        final, tokens = stepper.final(work), stepper.tokens(work)
        assert final.finish is Finish.CANCELLED
        assert final.num_kv_tokens == 30 + max(0, len(tokens) - 1)
        again = more(stepper, name, 5, 2)
        assert stepper.run(again) == [Finish.LENGTH]
        assert stepper.final(again).num_kv_tokens == final.num_kv_tokens + 5 + 1
        stepper.end(name)


def test_a_stop_on_the_first_token_at_any_age(stepper):
    everything = Sampling(stop_token_ids=tuple(range(256)))
    stepper.run(begin(stepper, "a"))
    for number in range(40):
        work = replace(more(stepper, "a", 30, 20, number), sampling=everything)
        assert stepper.run(work) == [Finish.STOP]
        assert stepper.tokens(work) == []
        assert stepper.final(work).num_kv_tokens == 100 + 30 * (number + 1)


def test_an_empty_chunk_and_a_second_work_end_that_session_only(stepper):
    bystander = begin(stepper, "bystander", 100, 200)
    stepper.submit(bystander)
    for name, wrong in (("empty", ()), ("twice", prompt(5))):
        stepper.run(*(more(stepper, name, 60, 0, n) for n in range(1)))
        if name == "twice":
            stepper.submit(more(stepper, name, 400, 50))
        work = replace(stepper.work(name, wrong), num_head_tokens=HEAD)
        stepper.submit(work)
        assert stepper.final(work).finish is Finish.REFUSED
    stepper.step_until(lambda: stepper.final(bystander))
    assert stepper.final(bystander).finish is Finish.LENGTH


@pytest.mark.parametrize(
    "keep,why",
    [
        (10, "its head stays for ever"),
        (HEAD - 1, "its head"),
        (10_000, "it has fewer"),
        (300, "what comes before them was freed"),
    ],
)
def test_going_back_where_nothing_is_left_ends_that_session_only(stepper, keep, why):
    bystander = begin(stepper, "bystander", 100, 60)
    stepper.submit(bystander)
    stepper.run(begin(stepper, "a", 400))
    work = replace(more(stepper, "a", 5), keep_tokens=keep)
    stepper.submit(work)
    result = stepper.final(work)
    assert result.finish is Finish.REFUSED
    assert f"Of its 400 tokens the session cannot keep {keep}: {why}" in result.error
    stepper.step_until(lambda: stepper.final(bystander))
    assert stepper.final(bystander).finish is Finish.LENGTH


def test_a_new_session_has_nothing_to_keep(stepper):
    work = replace(begin(stepper, "a"), keep_tokens=5)
    stepper.submit(work)
    assert "has no 5 tokens to keep" in stepper.final(work).error
    assert stepper.run(replace(begin(stepper, "b"), keep_tokens=0)) == [Finish.FED]


def test_aborts_at_any_moment_leave_nothing(stepper):
    for moment in range(30):
        stepper.run(begin(stepper, f"a{moment}", 200))
        work: Work = more(stepper, f"a{moment}", 150, 8)
        stepper.submit(work)
        for _ in range(moment % 15):
            if stepper.final(work) is None:
                stepper.step()
        stepper.end(work.session_id)
    stepper.run_idle()
    stepper.check_empty()
    assert not stepper.core._held
    (manager,) = stepper.scheduler.kv_cache_manager.coordinator.single_type_managers
    assert not manager.heads and not manager.num_cached_block
