"""The windowed engine's logits against Hugging Face's under an explicit mask; part of windowed_engine_gpu.py.

A small Qwen2 with random weights, saved once and read by both. The engine computes in bf16 with everything
switched on (asynchronous scheduling, compilation, CUDA graphs, chunks), Hugging Face in float32. How far bf16
alone leads is measured too: the same for vLLM's own attention (kv=unbounded) under the causal mask.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from engine.models.family import EngineRecipe
from engine.types import Work
from engine.vllm.settings import VllmSettings

WINDOW, SINKS, BLOCK = 64, 21, 16
CHUNKS = (90, 50, 1, 50, 17, 50, 200, 3)  # tokens appended in turn, each answered with ANSWER tokens
ANSWER = 12


@dataclass
class Recorded:
    """A session as it was computed: its tokens, the tokens of each step, and each step's last logits."""

    tokens: list[int]
    ends: list[int]  # tokens done after each step
    logits: Any  # [steps, vocabulary] float32 on the CPU, of the last token of each step


def save_model(directory: Path) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(5)
    config = Qwen2Config(
        hidden_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=2048,
        vocab_size=2048,
        max_position_embeddings=4096,
        initializer_range=0.06,  # wide, so that attention is not uniform and the mask shows
    )
    model: Any = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(directory)


def run_engine(directory: Path, device: str, kv: str, eager: bool, **overrides: Any) -> Recorded:
    """One session in a fresh engine, beside others of other ages, so that batches are mixed."""
    import torch

    from engine.vllm.core import SessionCore
    from engine.vllm.loading import load

    settings = VllmSettings(
        device=device,  # type: ignore[arg-type]
        max_sessions=16,
        max_batch_tokens=2048,
        kv_cache_bytes=1 << 28,
        block_size_tokens=BLOCK,
        eager=eager,
        kv=kv,  # type: ignore[arg-type]
        window_tokens=WINDOW,
        max_sink_tokens=64,
        max_chunk_tokens=128,
    )
    recipe = EngineRecipe(directory, 2048, overrides={"skip_tokenizer_init": True} | overrides)
    core = SessionCore(load(recipe, settings), None)
    watch = Watch(core._core.model_executor.driver_worker.worker)  # type: ignore[attr-defined]
    tokens: list[int] = []
    owed: tuple[int, ...] = ()
    generator = torch.Generator().manual_seed(1)
    core.submit(Work("other", 0, 0, tuple(range(5, 300)), num_head_tokens=8, max_tokens=200))
    for size in CHUNKS:
        fed = (*owed, *torch.randint(10, 2000, (size,), generator=generator).tolist())
        core.submit(Work("a", 0, 1, fed, num_head_tokens=SINKS, max_tokens=ANSWER))
        answer: list[int] = []
        while True:
            core.step()
            results = [result for result in core.take_results() if result.session_id == "a"]
            answer += [token for result in results for token in result.token_ids]
            if any(result.finish is not None for result in results):
                break
        assert len(answer) == ANSWER, results
        tokens += [*fed, *answer[:-1]]
        owed = (answer[-1],)
    core.shutdown()
    ends = [end for end in sorted(watch.logits) if end <= len(tokens)]
    assert ends[-1] == len(tokens)
    return Recorded(tokens, ends, torch.stack([watch.logits[end] for end in ends]))


class Watch:
    """Keeps the logits of session "a" by the number of its tokens that were done with them.

    A step that asynchronous scheduling ran in vain is overwritten by the real one at the same position.
    """

    def __init__(self, worker: Any) -> None:
        self.logits: dict[int, Any] = {}
        self._runner = worker.model_runner
        self._ends: dict[str, int] = {}  # of the step that runs
        self._rows: list[str] | None = None
        self._execute, self._compute = worker.execute_model, self._runner.model.compute_logits
        worker.execute_model, self._runner.model.compute_logits = self._on_execute, self._on_logits
        if hasattr(self._runner, "sample"):  # runner V2, which orders each batch anew
            self._sample = self._runner.sample
            self._runner.sample = self._on_sample

    def _on_execute(self, scheduled: Any) -> Any:
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
                self.logits[self._ends[name]] = logits[row].float().cpu()
        return logits


def judge(directory: Path, recorded: Recorded, mask: Any, device: str) -> Any:
    """Hugging Face's float32 logits at the last position of each step, [steps, vocabulary]."""
    import torch
    from transformers import Qwen2ForCausalLM

    model = Qwen2ForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    additive = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    tokens = torch.tensor([recorded.tokens], device=device)
    with torch.inference_mode():
        out = model.to(device)(tokens, attention_mask=additive[None, None].to(device))  # type: ignore[arg-type]
    return out.logits[0].cpu()[torch.tensor(recorded.ends) - 1]


def exact_mask(total: int) -> Any:
    """What the CUDA kernel shows: [0, S) and the last W."""
    import torch

    from kernels.sink_window.reference import visible_mask

    positions = torch.arange(total)
    return visible_mask(positions, positions, SINKS, WINDOW)


def rounded_mask(ends: list[int]) -> Any:
    """What the CPU path shows; for dry runs of this file."""
    import torch

    from engine.vllm.sink_window.layout import gap_blocks

    mask = torch.ones((ends[-1], ends[-1]), dtype=torch.bool).tril()
    for done, end in pairwise([0, *ends]):
        first, last = gap_blocks(SINKS, done, WINDOW, BLOCK)
        mask[done:end, first * BLOCK : max(first, last) * BLOCK] = False
    return mask


def relative_error(found: Any, expected: Any) -> float:
    return round(float((found - expected).norm() / expected.norm()), 5)


def compare(directory: Path, device: str) -> list[dict[str, Any]]:
    """Relative errors. The windowed engine's must be about the unbounded one's; a wrong mask's is not."""
    save_model(directory)
    rows = []
    variants: list[tuple[str, bool, dict[str, Any]]] = [("unbounded", True, {}), ("windowed", True, {})]
    if device == "cuda":
        variants += [("windowed", False, {}), ("windowed", False, {"kv_cache_dtype": "fp8"})]
    for kv, eager, overrides in variants:
        row = {"kv": kv, "graphs": not eager, **overrides}
        try:
            row |= errors(directory, device, kv, run_engine(directory, device, kv, eager, **overrides))
        except Exception as error:  # one variant's failure must not cost a GPU call's other results
            traceback.print_exc()
            row["failed"] = f"{type(error).__name__}: {error}"
        rows.append(row)
        print(row, flush=True)
    return rows


def errors(directory: Path, device: str, kv: str, recorded: Recorded) -> dict[str, Any]:
    import torch

    causal = torch.ones((len(recorded.tokens),) * 2, dtype=torch.bool).tril()
    shown = exact_mask(len(recorded.tokens)) if device == "cuda" else rounded_mask(recorded.ends)
    mask = causal if kv == "unbounded" else shown
    return {
        "tokens": len(recorded.tokens),
        "steps": len(recorded.ends),
        "error": relative_error(recorded.logits, judge(directory, recorded, mask, device)),
        "error_causal_mask": relative_error(recorded.logits, judge(directory, recorded, causal, device)),
    }
