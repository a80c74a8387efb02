"""What the manager holds, against a plain model of it: one set of kept token slots per session."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from engine.vllm.sink_window.layout import gap_blocks, max_blocks

pytestmark = pytest.mark.vllm

MAX_LEN, NUM_BLOCKS = 700, 400


@dataclass
class PlainSession:
    """Tokens [0, end) are held or gone; of those, [0, done) are computed."""

    sinks: int
    request: Any
    end: int = 0
    done: int = 0
    swept: int = 0  # tokens that were done when blocks were last freed
    compacted: int = 0  # tokens that left the record; the counts above are without them

    def kept_blocks(self, window: int, block_size: int) -> set[int]:
        num_slots = -(-self.end // block_size) * block_size
        return {i // block_size for i in range(num_slots) if i < self.sinks or i >= self.swept - window + 1}


def make(window: int, max_sinks: int, in_flight: int, block_size: int) -> tuple[Any, Any]:
    """A KV manager over one windowed group, and its spec."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    from engine.vllm.sink_window.spec import SinkWindowSpec

    register_all_kvcache_specs(None)
    spec = SinkWindowSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=8,
        dtype=torch.float32,
        window_tokens=window,
        max_sink_tokens=max_sinks,
        in_flight_tokens=in_flight,
        max_session_tokens=MAX_LEN,
    )
    config = KVCacheConfig(
        num_blocks=NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    manager = KVCacheManager(
        config,
        max_model_len=MAX_LEN,
        scheduler_block_size=block_size,
        hash_block_size=block_size,
        max_in_flight_tokens=in_flight,
        enable_caching=False,
    )
    return manager, spec


def new_request(name: str):
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    return Request(name, [0] * MAX_LEN, SamplingParams(max_tokens=1), None, resumable=True)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_random_sessions_appends_and_aborts(seed, steps_in_flight):
    rng = random.Random(seed)
    block_size, window = rng.choice([16, 32]), rng.choice([1, 15, 16, 17, 40, 100])
    max_sinks, chunk = rng.choice([0, 16, 40, 64]), rng.choice([1, 16, 50])
    manager, spec = make(window, max_sinks, steps_in_flight * chunk, block_size)
    (single,) = manager.coordinator.single_type_managers
    sessions: dict[str, PlainSession] = {}
    in_flight: list[list[tuple[str, int]]] = []
    for number in range(250):
        if rng.random() < 0.15 and len(sessions) < 8:
            name = f"s{number}"
            sessions[name] = PlainSession(rng.randint(0, max_sinks), new_request(name))
            single.heads[name] = sessions[name].sinks
        if rng.random() < 0.04 and sessions:
            gone = rng.choice(list(sessions))
            manager.free(sessions.pop(gone).request)
        step = []
        for name, session in sessions.items():
            num_new = min(rng.randint(0, chunk), MAX_LEN - session.end)
            if num_new == 0 or rng.random() < 0.3:
                continue
            session.request.num_computed_tokens = session.end
            session.request.num_in_flight_tokens = session.end - session.done
            assert manager.allocate_slots(session.request, num_new) is not None
            session.swept, session.end = session.done, session.end + num_new
            step.append((name, num_new))
        in_flight.append(step)
        if len(in_flight) >= steps_in_flight:
            for name, num_done in in_flight.pop(0):
                if name in sessions:
                    sessions[name].done += num_done
        for name, session in sessions.items():  # a parked session is swept too
            if rng.random() < 0.2:
                manager.remove_skipped_blocks(name, session.done)
                session.swept = session.done
            if session.done == session.end > 0 and rng.random() < 0.3:
                tidy(session, single, rng, window, block_size)
        check(manager, single, sessions, spec)
    assert chunk < 50 or any(session.compacted for session in sessions.values())
    for session in sessions.values():
        manager.free(session.request)
    assert manager.block_pool.get_num_free_blocks() == NUM_BLOCKS - 1
    assert not single.heads


def tidy(session: PlainSession, single: Any, rng: random.Random, window: int, block_size: int) -> None:
    """No step in flight: go back to fewer tokens, where that can be honoured, or cut the gap out."""
    from engine.vllm.compaction.parked import compact, forget, why_not_forget

    request, slack = session.request, rng.choice([1, 32, 64])
    request.num_computed_tokens, request.num_in_flight_tokens = session.done, 0
    request._all_token_ids[:] = [0] * session.done
    first, last = gap_blocks(session.sinks, session.swept, window, block_size)
    gap = max(0, last - first) * block_size
    if rng.random() < 0.5:
        keep = session.done - rng.randint(0, 40)
        is_possible = keep + session.compacted >= min(session.sinks, session.done)
        if gap or session.compacted:
            is_possible &= keep >= max(first, last) * block_size
        counted = keep + session.compacted
        reason = why_not_forget(request, [single], counted, session.compacted, session.sinks, True)
        assert (reason is None) == is_possible
        if not is_possible:
            return
        forget(request, [single], keep)
        session.done = session.end = keep
        slack = 1
    move = compact(request, single, slack)
    assert (move is None) == (gap < slack)
    if move is not None:
        table = single.req_to_blocks[request.request_id]
        assert (move.distance_tokens, move.block_ids) == (gap, tuple(b.block_id for b in table[first:]))
        session.done -= gap
        session.end -= gap
        session.swept = 0  # all that is left is seen: nothing of it is freed before the window moves on
        session.compacted += gap
    assert request.num_computed_tokens == session.done == request.num_tokens


def check(manager, single, sessions, spec):
    owned = []
    for name, session in sessions.items():
        blocks = single.req_to_blocks.get(name, [])
        assert len(blocks) == -(-session.end // spec.block_size)
        held = {index for index, block in enumerate(blocks) if not block.is_null}
        assert held == session.kept_blocks(spec.window_tokens, spec.block_size)
        assert len(held) <= spec.max_blocks
        owned += [blocks[index].block_id for index in held]
    assert len(owned) == len(set(owned))
    assert manager.block_pool.get_num_free_blocks() == NUM_BLOCKS - 1 - len(owned)


def test_the_bound_is_reached_and_never_passed():
    for block_size, window, sinks, chunk in [(16, 40, 20, 16), (16, 1, 0, 1), (32, 100, 33, 50)]:
        bound = max_blocks(sinks, window, chunk, 10_000, block_size)
        worst = 0
        for done in range(400, 400 + 4 * block_size):
            first, last = gap_blocks(sinks, done, window, block_size)
            worst = max(worst, -(-(done + chunk) // block_size) - max(0, last - first))
        assert worst == bound


def test_specs_merge_only_with_their_own_kind():
    from vllm.v1.kv_cache_interface import FullAttentionSpec, replace_as

    from engine.vllm.sink_window.spec import SinkWindowSpec

    _, spec = make(100, 16, 50, 16)
    assert SinkWindowSpec.merge([spec, replace(spec)]) == spec
    own = ("window_tokens", "max_sink_tokens", "in_flight_tokens", "max_session_tokens")
    others: list[Any] = [replace(spec, window_tokens=99), replace_as(spec, FullAttentionSpec, drop=own)]
    for other in others:
        with pytest.raises(AssertionError):
            SinkWindowSpec.merge([spec, other])
    assert spec.max_memory_usage_bytes(None) == spec.max_blocks * spec.page_size_bytes
