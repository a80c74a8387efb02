"""What compaction costs in quality, in the real engine: SmolLM2-135M-Instruct on the CPU, teacher-forced.

    python -m bench.compaction_quality [--only drift perplexity sinks] [--report-only]

drift       The same text through an engine that compacts and through one that keeps every position, same
            window, same chunks: 100 compactions of 64 tokens each, bf16 and float32, S = 0 and 16. With S = 0
            nothing but rounding may differ; with sinks, those of the compacted run also stand nearer, as in
            StreamingLLM (arXiv:2309.17453).
perplexity  50,000 tokens through one compacted session of S = 16, and 20,000 for S = 0, 1, 4, 64: six times
            the positions that the model was trained for, of which no more than 1,800 are ever used. The CPU
            path rounds S up to its block: 1, 4 and 16 are the same session there.
sinks       S = 0, 1, 4, 16, 64 over 20,000 tokens with the exact mask, in transformers (compaction_sinks.py).

Text: the books of bench/data one after the other, the first again where they end. A loss is that of float32
scores over the whole vocabulary, made of the hidden states that vLLM's model returned. Each part is written
to the JSON when it is done, and one that is there is not run again. The plot needs pip install -e '.[bench]'.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.vllm.environment import prepare_process, repair_torch_companions

prepare_process("cpu")
repair_torch_companions()

import torch  # noqa: E402  (the threads of torch are set before)
from torch.nn import functional  # noqa: E402

from bench import compaction_sinks  # noqa: E402
from bench.compaction_quality_report import write_report  # noqa: E402
from bench.server_process import machine  # noqa: E402
from bench.window_quality import CACHE, DATA, DOCUMENTS, RESULTS  # noqa: E402
from engine.models import bundles  # noqa: E402
from engine.models.family import EngineRecipe  # noqa: E402
from engine.models.prepare import prepare  # noqa: E402
from engine.models.text import TextCodec  # noqa: E402
from engine.types import Finish, Work  # noqa: E402
from engine.vllm.core import SessionCore  # noqa: E402
from engine.vllm.loading import load  # noqa: E402
from engine.vllm.settings import VllmSettings  # noqa: E402

PARTS = ("drift", "perplexity", "sinks")
TRAINED = 8192  # positions
BUCKET = 256  # tokens of a mean
DRIFT = {"window_tokens": 512, "slack_tokens": 64, "chunk_tokens": 64, "num_tokens": 7040}
LONG = {"window_tokens": 1024, "slack_tokens": 512, "chunk_tokens": 256}
EXACT_SINKS = (1, 4, 16, 0, 64)
LENGTHS = {16: 50_000, 0: 20_000, 1: 20_000, 4: 20_000, 64: 20_000}  # tokens by S


@dataclass(frozen=True)
class Passage:
    """A text's way through a session."""

    hidden: torch.Tensor  # [tokens, hidden size], what the model returned
    num_compactions: int
    largest_position: int  # that any token was computed at
    seconds: float


@contextmanager
def engine(directory: Path, window: int, slack: int, dtype: str = "bfloat16") -> Iterator[SessionCore]:
    """`slack` 0 never compacts."""
    settings = VllmSettings(
        max_sessions=1,
        max_batch_tokens=512,
        kv_cache_bytes=512 << 20,
        dtype=dtype,
        window_tokens=window,
        max_sink_tokens=64,
        compaction_slack_tokens=slack,
    )
    recipe = EngineRecipe(directory, TRAINED, overrides={"skip_tokenizer_init": True})
    core = SessionCore(load(recipe, settings), None)
    try:
        yield core
    finally:
        core.shutdown()


def model_of(core: SessionCore) -> Any:
    return core._core.model_executor.driver_worker.worker.model_runner.model  # pyright: ignore


def feed(core: SessionCore, name: str, tokens: Sequence[int], num_sinks: int, chunk: int) -> Passage:
    """One session takes the tokens in, chunk by chunk, and ends."""
    hidden: list[torch.Tensor] = []
    hook = model_of(core).register_forward_hook(lambda _model, _inputs, output: hidden.append(output.clone()))
    num_compactions = evicted = largest = 0
    begin = time.perf_counter()
    try:
        for seq, start in enumerate(range(0, len(tokens), chunk)):
            part = tuple(tokens[start : start + chunk])
            core.submit(Work(name, 0, seq, part, max_tokens=0, num_head_tokens=num_sinks))
            while core.has_work():
                core.step()
            (result,) = core.take_results()
            if result.finish is not Finish.FED:
                raise RuntimeError(f"token {start}: {result}")
            session = core._sessions[name]
            num_compactions += session.num_evicted > evicted
            evicted = session.num_evicted
            largest = max(largest, start + len(part) - evicted)
    finally:
        hook.remove()
    core.end(name, 0)
    while core.has_work():
        core.step()
    return Passage(torch.cat(hidden), num_compactions, largest, time.perf_counter() - begin)


def scores(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the next token, float32."""
    return (hidden.float() @ weight.T).log_softmax(dim=1)


@torch.inference_mode()
def losses(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood in nats of every next token."""
    pieces = zip(hidden.split(BUCKET), targets.split(BUCKET), strict=True)
    return torch.cat([functional.nll_loss(scores(h, weight), t, reduction="none") for h, t in pieces])


@torch.inference_mode()
def apart(
    one: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, bucket: int
) -> dict[str, list[float]]:
    """How far two runs' predictions lie apart, by bucket of tokens: KL(one || other) in nats and its largest,
    the change of the loss, and how often their first choices are the same."""
    columns: dict[str, list[float]] = {"kl": [], "largest_kl": [], "loss_change": [], "same_choice": []}
    for a, b, target in zip(one.split(bucket), other.split(bucket), targets.split(bucket), strict=True):
        p, q = scores(a, weight), scores(b, weight)
        kl = (p.exp() * (p - q)).sum(dim=1)
        change = (p - q).gather(1, target[:, None])
        columns["kl"].append(float(kl.mean()))
        columns["largest_kl"].append(float(kl.max()))
        columns["loss_change"].append(float(change.mean()))
        columns["same_choice"].append(float((p.argmax(1) == q.argmax(1)).float().mean()))
    return columns


def drift(directory: Path, tokens: list[int]) -> dict[str, Any]:
    """Every pair of runs that says something, by bucket of one compaction."""
    window, slack, chunk = DRIFT["window_tokens"], DRIFT["slack_tokens"], DRIFT["chunk_tokens"]
    text, targets = tokens[: DRIFT["num_tokens"]], torch.tensor(tokens[1 : DRIFT["num_tokens"] + 1])
    runs: dict[tuple[str, bool, int], Passage] = {}
    weight = torch.empty(0)
    for dtype in ("bfloat16", "float32"):
        for is_compacted in (False, True):
            with engine(directory, window, slack if is_compacted else 0, dtype) as core:
                weight = model_of(core).lm_head.weight.detach().float().clone()
                for sinks in (0, 16):
                    run = feed(core, f"S={sinks}", text, sinks, chunk)
                    runs[dtype, is_compacted, sinks] = run
                    print(
                        f"drift {dtype} S={sinks}: {run.num_compactions} compactions, {run.seconds:.0f} s",
                        flush=True,
                    )
    pairs = {}
    for sinks in (0, 16):
        for dtype in ("float32", "bfloat16"):
            kept, moved = runs[dtype, False, sinks], runs[dtype, True, sinks]
            pairs[f"S={sinks}, {dtype}: compacted, against kept positions"] = (kept, moved)
        for name, moved in (("kept positions", False), ("compacted", True)):
            pairs[f"S={sinks}, {name}: bfloat16, against float32"] = (
                runs["float32", moved, sinks],
                runs["bfloat16", moved, sinks],
            )
    compacted = runs["bfloat16", True, 16]
    return DRIFT | {
        "num_compactions": compacted.num_compactions,
        "first_compacted_bucket": (window + slack) // chunk + 1,
        "largest_position": {
            "kept": runs["bfloat16", False, 0].largest_position,
            "compacted": compacted.largest_position,
        },
        "pairs": {name: apart(a.hidden, b.hidden, weight, targets, chunk) for name, (a, b) in pairs.items()},
    }


def perplexity(directory: Path, tokens: list[int], result: dict[str, Any], path: Path) -> None:
    """One session per S, written to `path` as each ends."""
    runs = result.setdefault("perplexity", LONG | {"bucket_tokens": BUCKET, "runs": {}})["runs"]
    missing = [sinks for sinks in LENGTHS if f"S={sinks}" not in runs]
    if not missing:
        return
    with engine(directory, LONG["window_tokens"], LONG["slack_tokens"]) as core:
        weight = model_of(core).lm_head.weight.detach().float()
        for sinks in missing:
            length = LENGTHS[sinks]
            run = feed(core, f"S={sinks}", tokens[:length], sinks, LONG["chunk_tokens"])
            nll = losses(run.hidden, weight, torch.tensor(tokens[1 : length + 1]))
            runs[f"S={sinks}"] = {
                "num_tokens": length,
                "num_compactions": run.num_compactions,
                "largest_position": run.largest_position,
                "seconds": round(run.seconds, 1),
                "mean_nll_by_bucket": [round(float(part.mean()), 5) for part in nll.split(BUCKET)],
            }
            path.write_text(json.dumps(result, indent=1) + "\n")
            print(
                f"perplexity S={sinks}: {float(nll.mean().exp()):.2f} over {length}, {run.seconds:.0f} s",
                flush=True,
            )


def books(codec: TextCodec, num_tokens: int) -> tuple[list[int], dict[str, int]]:
    """The text, and where each book begins in it."""
    tokens: list[int] = []
    begins: dict[str, int] = {}
    for name in (*DOCUMENTS, f"{DOCUMENTS[0]} again"):
        begins[name] = len(tokens)
        tokens += codec.encode((DATA / f"{name.split()[0]}.txt").read_text())
    if len(tokens) < num_tokens:
        raise ValueError(f"the books have {len(tokens)} tokens, not {num_tokens}")
    return tokens[:num_tokens], begins


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--report-only", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "compaction_quality.json")
    options = parser.parse_args()
    path: Path = options.out
    result: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if not options.report_only:
        directory = prepare(bundles.SMOLLM2, CACHE)
        tokens, begins = books(TextCodec(directory / "tokenizer.json"), max(LENGTHS.values()) + 1)
        result = {"machine": machine(), "books": begins} | result
        if "drift" in options.only and "drift" not in result:
            result["drift"] = drift(directory, tokens)
            path.write_text(json.dumps(result, indent=1) + "\n")
        if "perplexity" in options.only:
            perplexity(directory, tokens, result, path)
        if "sinks" in options.only:
            sizes = LONG | {"bucket_tokens": BUCKET}
            compaction_sinks.measure(directory, tokens[:20_001], EXACT_SINKS, sizes, path, result)
    write_report(result, path)


if __name__ == "__main__":
    main()
