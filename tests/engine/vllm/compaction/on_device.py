"""Compaction on CUDA: V2's runner, asynchronous scheduling, CUDA graphs. Run it on the GPU machine:

    VLLM_USE_FLASHINFER_SAMPLER=0 python3 -m tests.engine.vllm.compaction.on_device [--out FILE]
    python -m tests.engine.vllm.compaction.on_device --device cpu        a dry run of every line

logits  each step's last logits against Hugging Face's float32 model, cut and turned back the same way, over
        many compactions and steps back; bf16's own error is known from the steps before the first compaction
chaos   works, cancels, ends and steps back at random moments: every count right, nothing left
long    32 sessions of different phases at max_model_len of about 2,048 pass 20,000 tokens each

One JSON line each; exit status 1 if anything failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.models.family import EngineRecipe
from engine.types import Finish, Work
from engine.vllm.environment import prepare_process, repair_torch_companions
from engine.vllm.settings import VllmSettings

W, SINKS, BLOCK, SLACK, CHUNK = 64, 21, 16, 96, 128
NUM_TURNS = 60
MAX_GROWTH = 1.6  # of the error, by compacting: a wrong window or position makes an error over 1
VOCAB_SIZE = 2048


def save_model(directory: Path) -> EngineRecipe:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(5)
    config = Qwen2Config(
        hidden_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=2048,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=4096,
        initializer_range=0.06,  # wide, so that attention is not uniform and positions show
    )
    model: Any = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(directory)
    return EngineRecipe(directory, 4096, overrides={"skip_tokenizer_init": True})


def make_core(recipe: EngineRecipe, device: Any, eager: bool, **changes: Any) -> Any:
    from engine.vllm.core import SessionCore
    from engine.vllm.loading import load

    given: dict[str, Any] = dict(
        max_sessions=34,
        max_batch_tokens=1024,
        kv_cache_bytes=1 << 28,
        block_size_tokens=BLOCK,
        window_tokens=W,
        max_sink_tokens=32,
        max_chunk_tokens=CHUNK,
        compaction_slack_tokens=SLACK,
    )
    settings = VllmSettings(device=device, eager=eager, **(given | changes))
    core = SessionCore(load(recipe, settings), None)
    assert core.limits.max_session_tokens is None, "compaction is off"
    return core


class Watch:
    """Each step's last logits of session "a", by the number of its tokens that were done, evicted included.

    A step that asynchronous scheduling ran in vain is overwritten by the real one at the same position.
    """

    def __init__(self, worker: Any) -> None:
        self.logits: dict[int, Any] = {}
        self.num_evicted = self.num_moves = 0
        self._runner = worker.model_runner
        self._ends: dict[str, int] = {}  # of the step that runs
        self._rows: list[str] | None = None
        self._execute, self._compute = worker.execute_model, self._runner.model.compute_logits
        worker.execute_model, self._runner.model.compute_logits = self._on_execute, self._on_logits
        if hasattr(self._runner, "sample"):  # runner V2, which orders each batch anew
            self._sample = self._runner.sample
            self._runner.sample = self._on_sample

    def _on_execute(self, scheduled: Any) -> Any:
        from engine.vllm.compaction.worker import attached_moves

        for move in attached_moves(scheduled):
            if move.request_id.startswith("a:"):
                self.num_evicted += move.distance_tokens
                self.num_moves += 1
        cached = scheduled.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        self._ends = {name: starts[name] + size for name, size in scheduled.num_scheduled_tokens.items()}
        return self._execute(scheduled)

    def _on_sample(self, hidden_states: Any, input_batch: Any, *args: Any) -> Any:
        self._rows = list(input_batch.req_ids)
        return self._sample(hidden_states, input_batch, *args)

    def _on_logits(self, hidden_states: Any, *args: Any) -> Any:
        logits = self._compute(hidden_states, *args)
        for row, name in enumerate(self._rows or self._runner.input_batch.req_ids):
            if name.startswith("a:"):
                self.logits[self.num_evicted + self._ends[name]] = logits[row].float().cpu()
        return logits


def run_work(core: Any, work: Work) -> tuple[int, ...]:
    """Step until it is finished; its tokens."""
    core.submit(work)
    tokens: list[int] = []
    while True:
        for result in core.take_results():
            assert result.finish is not Finish.REFUSED, result.error
            if result.session_id == work.session_id:
                tokens += result.token_ids
                if result.finish is not None:
                    return tuple(tokens)
        core.step()


def logits(recipe: EngineRecipe, device: str, eager: bool, **changes: Any) -> dict[str, Any]:
    """Session "a" beside one that decodes all the time, so that batches are mixed."""
    import torch
    from transformers import Qwen2ForCausalLM

    from tests.engine.vllm.compaction.judging import JudgedSession

    core = make_core(recipe, device, eager, **changes)
    watch = Watch(core._core.model_executor.driver_worker.worker)
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
        return round(float((recorded[start:stop] - expected).norm() / expected.norm()), 5)

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


def chaos(recipe: EngineRecipe, device: str, eager: bool) -> dict[str, Any]:
    from tests.engine.vllm.compaction.chaos import Chaos

    core = make_core(recipe, device, eager)
    counts: dict[str, int] = {}
    for seed in range(4 if device == "cuda" else 1):
        counts = dict(Chaos(core, seed, 16, VOCAB_SIZE).run(1500 if device == "cuda" else 200))
    core._core.shutdown()
    return counts


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
    core._core.shutdown()
    assert row["max_model_len"] <= 2048 and most <= row["blocks_bound"], row
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", choices=["logits", "chaos", "long"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    prepare_process(options.device)
    repair_torch_companions()
    parts: dict[str, Callable[..., dict[str, Any]]] = {"logits": logits, "chaos": chaos, "long": long}
    variants: list[dict[str, Any]] = [{"eager": True}]
    if options.device == "cuda":
        variants += [{"eager": False}, {"eager": False, "kv_dtype": "fp8"}]
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        recipe = save_model(Path(directory) / "model")
        for name, part in parts.items():
            if options.only not in (None, name):
                continue
            for variant in variants if name == "logits" else variants[:2][-1:]:
                row: dict[str, Any] = {"part": name, **variant}
                started = time.perf_counter()
                try:
                    row |= part(recipe, options.device, **variant)
                except Exception as error:  # one part's failure must not cost a GPU call's other results
                    traceback.print_exc()
                    row["failed"] = f"{type(error).__name__}: {error}"
                gc.collect()
                row["took_s"] = round(time.perf_counter() - started, 1)
                rows.append(row)
                print(json.dumps(row), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1))
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
