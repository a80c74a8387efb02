"""Sessions that do anything at any moment, and sessions without end."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from engine.models.family import EngineRecipe
from engine.types import Finish, Work
from tests.engine.vllm.compaction.on_device_engine import VOCAB_SIZE, make_core


def chaos(recipe: EngineRecipe, device: str, eager: bool) -> dict[str, Any]:
    from tests.engine.vllm.compaction.chaos import Chaos

    core = make_core(recipe, device, eager)
    counts: Counter[str] = Counter()
    for seed in range(4 if device == "cuda" else 1):
        counts += Chaos(core, seed, 16, VOCAB_SIZE).run(1500 if device == "cuda" else 200)
        print(f"chaos: seed {seed} passed", flush=True)
    core.shutdown()
    return {str(name): count for name, count in counts.items()}


def long(recipe: EngineRecipe, device: str, eager: bool, goal: int | None = None) -> dict[str, Any]:
    """Chunks of 50 tokens and answers of 8, each session in its own phase; others must not notice."""
    goal = goal or (20_000 if device == "cuda" else 100)
    window = dict(window_tokens=1024, max_sink_tokens=64, compaction_slack_tokens=448, max_chunk_tokens=256)
    core = make_core(recipe, device, eager, **window)
    names = [f"s{i}" for i in range(32)]
    ages, working, most = dict.fromkeys(names, 0), set(), 0
    started, seq = time.perf_counter(), 0
    while min(ages.values()) < goal:
        for i, name in enumerate(names):
            if name not in working:
                seq += 1
                tokens = tuple((31 * (ages[name] + j) + 7 * i) % 2000 + 10 for j in range(20 + 2 * i))
                core.submit(Work(name, 0, seq, tokens, num_head_tokens=2 * i + 1, max_tokens=8 * (i % 2)))
                working.add(name)
        core.step()
        most = max(most, core.stats().kv_blocks_used)
        for result in core.take_results():
            assert result.finish is not Finish.REFUSED, result.error
            ages[result.session_id] = result.num_kv_tokens
            if result.finish is not None:
                working.discard(result.session_id)
    row = {
        "max_model_len": core._scheduler.max_model_len,
        "youngest": min(ages.values()),
        "oldest": max(ages.values()),
        "blocks_used_at_most": most,
        "blocks_bound": 32 * core.limits.blocks_per_session,
        "tokens_per_s": round(sum(ages.values()) / (time.perf_counter() - started)),
    }
    core.shutdown()
    assert row["max_model_len"] <= 2048 and most <= row["blocks_bound"], row
    return row
