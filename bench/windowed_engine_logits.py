"""The windowed engine's logits against Hugging Face's under an explicit mask, in three studies.

    python -m bench.windowed_engine_logits {small,7b,mrope} --device cuda --out FILE.json

small   a Qwen2 of 4 layers, W = 64; with and without CUDA graphs, with an fp8 cache
7b      Qwen2.5-7B's shape, W = 1,024, S = 16, a session of about 3,000 tokens
mrope   Qwen2.5-Omni's thinker with its own M-RoPE, text only, 2 layers

Random weights, saved once and read by both. The engine computes in bf16 with everything switched on
(asynchronous scheduling, compilation, CUDA graphs, chunks, another session beside), Hugging Face in float32.
How far bf16 alone leads is measured too: Hugging Face in bf16 under the same mask, and vLLM's own attention
(kv=unbounded) under the causal one. What a wrong mask would give stands beside each.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.provenance import provenance
from engine.models.family import EngineRecipe
from engine.types import Work
from engine.vllm.environment import prepare_process, repair_torch_companions
from engine.vllm.settings import VllmSettings
from tests.support.logits_watch import LogitsWatch

BLOCK = 16
ANSWER = 12  # tokens decoded after each chunk


@dataclass(frozen=True)
class Study:
    """A model, a window, and the chunks that a session takes in."""

    save: Callable[[Path], None]  # weights and configuration
    judge: Callable[[Path], Any]  # Hugging Face's model of them
    window: int
    sinks: int
    chunks: tuple[int, ...]
    max_chunk: int
    variants: tuple[tuple[str, bool, dict[str, Any]], ...]  # kv, eager, further engine arguments
    overrides: dict[str, Any] = field(default_factory=dict)
    modality: str | None = None


def save_qwen2(directory: Path, **shape: Any) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(5)
    place = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(place):
        model: Any = Qwen2ForCausalLM(Qwen2Config(**shape))
    model.to(torch.bfloat16).save_pretrained(directory)


def judge_qwen2(directory: Path) -> Any:
    import torch
    from transformers import Qwen2ForCausalLM

    return Qwen2ForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, attn_implementation="eager")


def save_omni(directory: Path) -> None:
    from tests.support import tiny_omni

    tiny_omni.build_untokenized("qwen2.5-omni-7b", directory)


def judge_omni(directory: Path) -> Any:
    from tests.support import tiny_omni

    return tiny_omni.thinker(directory)


def save_small(directory: Path) -> None:
    save_qwen2(
        directory,
        hidden_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=2048,
        vocab_size=2048,
        max_position_embeddings=4096,
        initializer_range=0.06,  # wide, so that attention is not uniform and the mask shows
    )


def save_7b(directory: Path) -> None:
    from bench.windowed_engine_gpu import QWEN2_5_7B

    save_qwen2(directory, **QWEN2_5_7B)


_TEXT_ONLY = {"skip_tokenizer_init": True}
_ALL_VARIANTS = (
    ("unbounded", True, {}),
    ("windowed", True, {}),
    ("windowed", False, {}),
    ("windowed", False, {"kv_cache_dtype": "fp8"}),
)
STUDIES = {
    "small": Study(
        save_small, judge_qwen2, 64, 21, (90, 50, 1, 50, 17, 50, 200, 3), 128, _ALL_VARIANTS, _TEXT_ONLY
    ),
    "7b": Study(
        save_7b,
        judge_qwen2,
        1024,
        16,
        (900, 50, 700, 1, 400, 17, 600, 3, 150),
        256,
        (("windowed", False, {}),),
        _TEXT_ONLY,
    ),
    "mrope": Study(
        save_omni,
        judge_omni,
        64,
        21,
        (90, 50, 1, 50, 17, 50, 200, 3),
        128,
        (("unbounded", True, {}), ("windowed", False, {})),
        modality="audio",
    ),
}


@dataclass
class Recorded:
    """A session as it was computed: its tokens, the tokens of each step, and each step's last logits."""

    tokens: list[int]
    ends: list[int]  # tokens done after each step
    logits: Any  # [steps, vocabulary] float32 on the CPU, of the last token of each step


def run_engine(
    study: Study, directory: Path, device: str, kv: str, eager: bool, **overrides: Any
) -> Recorded:
    """One session in a fresh engine, beside another of another age, so that batches are mixed."""
    import torch

    from engine.vllm.core import SessionCore
    from engine.vllm.loading import load

    settings = VllmSettings(
        device=device,  # type: ignore[arg-type]
        max_sessions=16,
        max_batch_tokens=512,
        kv_cache_bytes=1 << 30,
        gpu_memory_utilization=0.3,
        block_size_tokens=BLOCK,
        eager=eager,
        kv=kv,  # type: ignore[arg-type]
        window_tokens=study.window,
        max_sink_tokens=64,
        max_chunk_tokens=study.max_chunk,
        compaction_slack_tokens=0,
    )
    recipe = EngineRecipe(
        directory, 4096, modality=study.modality, overrides={**study.overrides, **overrides}
    )
    core = SessionCore(load(recipe, settings), study.modality)
    watch = LogitsWatch(core)
    tokens: list[int] = []
    owed: tuple[int, ...] = ()
    generator = torch.Generator().manual_seed(1)
    core.submit(Work("other", 0, 0, tuple(range(5, 300)), num_head_tokens=8, max_tokens=200))
    for size in study.chunks:
        fed = (*owed, *torch.randint(10, 2000, (size,), generator=generator).tolist())
        core.submit(Work("a", 0, 1, fed, num_head_tokens=study.sinks, max_tokens=ANSWER))
        answer: list[int] = []
        results = []
        while not any(result.finish is not None for result in results):
            core.step()
            results = [result for result in core.take_results() if result.session_id == "a"]
            answer += [token for result in results for token in result.token_ids]
        assert len(answer) == ANSWER, results
        tokens += [*fed, *answer[:-1]]
        owed = (answer[-1],)
    core.shutdown()
    ends = [end for end in sorted(watch.logits) if end <= len(tokens)]
    assert ends[-1] == len(tokens)
    return Recorded(tokens, ends, torch.stack([watch.logits[end] for end in ends]))


class Judge:
    """Hugging Face's logits at the last position of each step, [steps, vocabulary] float32 on the CPU."""

    def __init__(self, study: Study, directory: Path, device: str) -> None:
        self._model = study.judge(directory).eval().to(device)
        self._device = device

    def logits(self, recorded: Recorded, mask: Any, dtype: Any) -> Any:
        import torch

        model = self._model
        for parameter in model.parameters():  # not `.to`: the rotation's frequencies stay float32
            parameter.data = parameter.data.to(dtype)
        total = len(recorded.tokens)
        additive = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
        tokens = torch.tensor([recorded.tokens], device=self._device)
        positions = torch.arange(total, device=self._device)[None]
        if "Omni" in type(model).__name__:
            positions = positions.expand(3, 1, total)  # M-RoPE's three, which are one without images
        with torch.inference_mode():
            out = model(
                input_ids=tokens,
                attention_mask=additive[None, None].to(self._device),
                position_ids=positions,
            )
        return out.logits[0, torch.tensor(recorded.ends, device=self._device) - 1].float().cpu()


def exact_mask(total: int, study: Study) -> Any:
    """What the CUDA kernel shows: [0, S) and the last W."""
    import torch

    from kernels.sink_window.reference import visible_mask

    positions = torch.arange(total)
    return visible_mask(positions, positions, study.sinks, study.window)


def rounded_mask(ends: list[int], study: Study) -> Any:
    """What the CPU path shows; for dry runs of this file."""
    import torch

    from engine.vllm.sink_window.layout import gap_blocks

    mask = torch.ones((ends[-1], ends[-1]), dtype=torch.bool).tril()
    for done, end in pairwise([0, *ends]):
        first, last = gap_blocks(study.sinks, done, study.window, BLOCK)
        mask[done:end, first * BLOCK : max(first, last) * BLOCK] = False
    return mask


def relative_error(found: Any, expected: Any) -> float:
    return round(float((found - expected).norm() / expected.norm()), 5)


def compare(study: Study, directory: Path, device: str) -> list[dict[str, Any]]:
    """Relative errors. The windowed engine's must be about those of bf16 alone; a wrong mask's is not."""
    started = time.perf_counter()
    study.save(directory)
    print(f"saved in {time.perf_counter() - started:.0f} s", flush=True)
    recorded: list[tuple[dict[str, Any], Recorded | None]] = []
    for kv, eager, overrides in study.variants:
        row: dict[str, Any] = {"kv": kv, "graphs": not eager, **overrides}
        try:
            recorded.append((row, run_engine(study, directory, device, kv, eager, **overrides)))
        except Exception as error:  # one variant's failure must not cost a GPU call's other results
            traceback.print_exc()
            recorded.append((row | {"failed": f"{type(error).__name__}: {error}"}, None))
        print(row, f"run after {time.perf_counter() - started:.0f} s", flush=True)
    judge = Judge(study, directory, device)
    rows = []
    for row, session in recorded:
        if session is not None:
            row |= errors(study, judge, device, row["kv"], session)
        rows.append(row)
        print(row, f"judged after {time.perf_counter() - started:.0f} s", flush=True)
    return rows


def errors(study: Study, judge: Judge, device: str, kv: str, recorded: Recorded) -> dict[str, Any]:
    import torch

    total = len(recorded.tokens)
    causal = torch.ones((total, total), dtype=torch.bool).tril()
    shown = exact_mask(total, study) if device == "cuda" else rounded_mask(recorded.ends, study)
    mask = causal if kv == "unbounded" else shown
    true = judge.logits(recorded, mask, torch.float32)
    wrong = judge.logits(recorded, causal, torch.float32)
    in_bf16 = judge.logits(recorded, mask, torch.bfloat16)
    late = torch.tensor([end > study.window + study.sinks for end in recorded.ends])
    return {
        "tokens": total,
        "steps": len(recorded.ends),
        "error": relative_error(recorded.logits, true),
        "error_past_window": relative_error(recorded.logits[late], true[late]),
        "error_of_bf16_alone": relative_error(in_bf16, true),
        "error_causal_mask": relative_error(recorded.logits, wrong),
        "same_top_token": round(float((recorded.logits.argmax(-1) == true.argmax(-1)).float().mean()), 4),
        "same_top_token_of_bf16_alone": round(
            float((in_bf16.argmax(-1) == true.argmax(-1)).float().mean()), 4
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    faulthandler.register(signal.SIGTERM, chain=True)  # `timeout` shall tell where it hung
    prepare_process(options.device)
    repair_torch_companions()
    study = STUDIES[options.study]
    with tempfile.TemporaryDirectory() as directory:
        rows = compare(study, Path(directory) / "model", options.device)
    sizes = {"window": study.window, "sinks": study.sinks}
    result = provenance(options.device) | {"part": f"logits_{options.study}"} | sizes | {"rows": rows}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    if any("failed" in row for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
