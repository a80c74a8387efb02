"""Logits over many compactions and steps back, against Hugging Face's model."""

from __future__ import annotations

from typing import Any

from engine.models.family import EngineRecipe
from engine.types import Work
from tests.engine.vllm.compaction.on_device_engine import (
    BLOCK,
    SINKS,
    SLACK,
    W,
    make_core,
    relative_error,
    run_work,
)
from tests.support.logits_watch import LogitsWatch

NUM_TURNS = 60
MAX_GROWTH = 1.6  # of the error, by compacting: a wrong window or position makes an error over 1


def logits(recipe: EngineRecipe, device: str, eager: bool, **changes: Any) -> dict[str, Any]:
    """Session "a" beside one that decodes all the time, so that batches are mixed."""
    import torch
    from transformers import Qwen2ForCausalLM

    from tests.engine.vllm.compaction.judging import JudgedSession

    core = make_core(recipe, device, eager, **changes)
    watch = LogitsWatch(core)
    core.submit(Work("other", 0, 0, tuple(range(5, 300)), num_head_tokens=8, max_tokens=100_000))
    generator = torch.Generator().manual_seed(1)
    turns: list[tuple[tuple[int, ...], list[int], int | None]] = []  # tokens computed, by step; kept before
    owed, kept, done = (), None, 0
    for turn in range(NUM_TURNS):
        size, max_tokens = (70, 33, 1, 50, 17, 64)[turn % 6], (12, 0, 5, 24)[turn % 4]  # within SLACK
        fed = (*owed, *torch.randint(10, 2000, (size,), generator=generator).tolist())
        work = Work("a", 0, turn, fed, num_head_tokens=SINKS, keep_tokens=kept, max_tokens=max_tokens)
        answer = run_work(core, work)
        computed = (*fed, *answer[:-1])
        turns.append((computed, [len(fed), *[1] * (len(answer) - 1)], kept))
        done = (done if kept is None else kept) + len(computed)
        owed, kept = answer[-1:], None
        if turn % 5 == 3 and len(answer) > 10:  # only a part of the answer was heard
            owed, kept = (), done - 10
            watch.logits = {end: value for end, value in watch.logits.items() if end <= kept}
    core._core.shutdown()

    model: Any = Qwen2ForCausalLM.from_pretrained(
        recipe.model_dir, dtype=torch.float32, attn_implementation="eager"
    ).to(device)  # type: ignore[arg-type]
    judged: dict[str, dict[int, Any]] = {}
    sessions = {
        name: JudgedSession(model, SINKS, W, BLOCK, slack, exact=device == "cuda")
        for name, slack in (("compacted", SLACK), ("uncompacted", None))
    }
    for name, session in sessions.items():
        found: dict[int, Any] = {}
        for computed, step_sizes, keep in turns:
            if keep is not None:
                session.forget(keep)
                found = {end: value for end, value in found.items() if end <= keep}
            rows = session.feed(computed, step_sizes)
            start = session.length + session.num_evicted - len(rows)
            found |= {start + i + 1: row for i, row in enumerate(rows.float().cpu())}
        judged[name] = found
    ends = sorted(end for end in watch.logits if end in judged["compacted"])
    recorded = torch.stack([watch.logits[end] for end in ends])

    def error(name: str, start: int, stop: int | None) -> float:
        expected = torch.stack([judged[name][end] for end in ends])[start:stop]
        return relative_error(recorded[start:stop], expected)

    young = sum(end < W for end in ends)
    row = {
        "tokens": done,
        "steps": len(ends),
        "compactions": watch.num_moves,
        "error_before_any": error("compacted", 0, max(young, 1)),
        "error": error("compacted", 0, None),
        "error_last_quarter": error("compacted", -(len(ends) // 4), None),
        "error_if_uncompacted": error("uncompacted", -(len(ends) // 4), None),
    }
    assert watch.num_moves == sessions["compacted"].num_compactions >= 10, row
    assert ends[-1] == done and row["error_last_quarter"] < MAX_GROWTH * row["error_before_any"], row
    assert row["error_if_uncompacted"] > 2 * row["error_last_quarter"], row
    return row
