"""What a session computes depends on its own resident blocks and nothing else in the cache, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from app.gate import Gate
from engine.conductor import Phase
from engine.engine import EngineLimits
from engine.types import SAMPLE_RATE, Features, Finish, Hearing
from tests.engine.vllm.sink_window.windowed import BLOCK, begin, blocks_per_session, more, prompt, settings

pytestmark = pytest.mark.vllm


@pytest.fixture
def start(family):
    """Starts engines of the tiny model, one at a time."""
    from engine.vllm.core import SessionCore
    from engine.vllm.loading import load
    from tests.engine.vllm.stepper import Stepper

    started = []

    def start(**changes) -> Stepper:
        while started:
            started.pop().shutdown()
        started.append(load(family.engine_recipe(), settings(**changes)))
        return Stepper(SessionCore(started[0], "audio"))

    yield start
    if started:
        started[0].shutdown()


def talk(stepper, name: str, works: list, is_poisoned: bool = False) -> list[torch.Tensor]:
    """Run the works; the model's output of every step."""
    from tests.engine.vllm.sink_window import recording

    engine_core = stepper.core._core
    with recording.hidden_states(engine_core) as recorded:
        for work in works:
            stepper.submit(work)
            while stepper.final(work) is None:
                stepper.step()
                if is_poisoned:
                    (ids,) = recording.blocks_of(stepper.scheduler, name)
                    recording.poison_all_but(engine_core, set(ids) - {0})
    return recorded


def long_talk(stepper, name: str) -> list:
    return [begin(stepper, name), *(more(stepper, name, 61, 9, seed) for seed in range(5))]


def test_nan_in_freed_null_and_foreign_blocks_changes_nothing(start):
    stepper = start()
    stepper.run(begin(stepper, "other", 150))
    clean = talk(stepper, "clean", long_talk(stepper, "clean"))
    poisoned = talk(stepper, "poisoned", long_talk(stepper, "poisoned"), is_poisoned=True)
    assert len(clean) == len(poisoned) > 50
    for a, b in zip(clean, poisoned, strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)


def test_the_gap_was_seen_before_and_its_values_would_show(start):
    """The counter-proof: a poisoned sink or window block does reach the output."""
    from tests.engine.vllm.sink_window import recording

    stepper = start()
    stepper.run(begin(stepper, "a", 300))
    (ids,) = recording.blocks_of(stepper.scheduler, "a")
    kept = [block for block in ids if block]
    assert ids[2:-5] == [0] * len(ids[2:-5])
    for lost in (kept[1], kept[-2]):
        recording.poison_all_but(stepper.core._core, set(kept) - {lost})
        (out,) = talk(stepper, "a", [more(stepper, "a", 1)])
        assert out.isnan().any()
        recording.heal(stepper.core._core)


def test_audio_that_left_the_window_cannot_be_heard_any_more(start, family):
    """Two layers reach back two windows and two chunks at most; items are cut by chunks and by the window."""
    stepper = start()
    outputs = {}
    for name, seed in (("a", 1), ("b", 2)):
        tokens, features = family_turn(family, seed)
        assert max(item.num_tokens for item in features) < len(tokens)
        heard = replace(more(stepper, name, 1), token_ids=tokens, features=features)
        later = [more(stepper, name, 60, 4, seed=seed) for seed in range(6)]
        outputs[name] = talk(stepper, name, [begin(stepper, name, 40), heard, *later])
        assert stepper.core.stats().kv_blocks_used <= len(outputs) * blocks_per_session()
    steps = list(zip(outputs["a"], outputs["b"], strict=True))
    assert not torch.equal(*steps[2])
    assert all(torch.equal(a, b) for a, b in steps[-8:])


def family_turn(family, seed: int) -> tuple[tuple[int, ...], tuple[Features, ...]]:
    """Three seconds of sound as the family would append them."""
    rng = np.random.default_rng(seed)
    audio = (rng.standard_normal(3 * SAMPLE_RATE) / 4).astype(np.float32)
    (intake,) = family.hear([Hearing("a", family.new_ear(), audio, is_final=True)])
    return intake.token_ids, intake.features


def test_unbounded_holds_everything_and_computes_the_same_until_the_window_is_full(start):
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    stepper = start(kv_cache_bytes=4 << 20, window_tokens=500)
    windowed = talk(stepper, "a", long_talk(stepper, "a"))
    num_windowed = stepper.core.limits.num_kv_blocks // stepper.core.limits.blocks_per_session

    stepper = start(kv="unbounded", kv_cache_bytes=4 << 20)
    core, limits = stepper.core._core, stepper.core.limits
    (group,) = core.scheduler.kv_cache_config.kv_cache_groups
    (manager,) = core.scheduler.kv_cache_manager.coordinator.single_type_managers
    assert (type(group.kv_cache_spec), type(manager)) == (FullAttentionSpec, FullAttentionManager)
    assert limits.blocks_per_session == -(-1001 // BLOCK)
    assert limits.num_kv_blocks // limits.blocks_per_session < num_windowed
    unbounded = talk(stepper, "a", long_talk(stepper, "a"))
    assert [len(out) for out in unbounded] != [len(out) for out in windowed]  # chunks are not bounded either
    torch.testing.assert_close(torch.cat(unbounded), torch.cat(windowed), atol=1e-4, rtol=1e-4)

    stepper.end("a")
    assert stepper.run(begin(stepper, "b", 600)) == [Finish.FED]
    assert stepper.core.stats().kv_blocks_used == -(-600 // BLOCK)
    long_head = replace(stepper.work("c", prompt(420)), num_head_tokens=400)
    assert stepper.run(long_head) == [Finish.FED]


def test_the_same_memory_admits_more_sessions(start):
    """`cap` is what `/capacity` reports."""
    pool = 8 << 20
    windowed = start(kv_cache_bytes=pool).core.limits
    whole = start(kv_cache_bytes=pool, kv="unbounded").core.limits
    assert windowed.num_kv_blocks == whole.num_kv_blocks
    assert windowed.blocks_per_session == blocks_per_session()
    assert cap(whole) == whole.num_kv_blocks // -(-1001 // BLOCK)
    assert cap(windowed) > 5 * cap(whole)


def cap(limits: EngineLimits) -> int:
    """Sessions that the gate lets in when nothing but the KV cache bounds them."""
    engine = SimpleNamespace(limits=replace(limits, max_sessions=10_000))
    limit: Any = SimpleNamespace(whole_cap=10_000)
    server: Any = SimpleNamespace(phase=Phase.READY, engine=engine)
    return Gate(limit, 10_000, server).cap
