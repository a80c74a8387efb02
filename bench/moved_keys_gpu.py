"""Moved keys in the whole engine on a GPU: runner V2, async scheduling, CUDA graphs, bf16 and fp8 caches.

    VLLM_USE_FLASHINFER_SAMPLER=0 python -m bench.moved_keys_gpu [--out FILE.json]
    python -m bench.moved_keys_gpu --device cpu                              a dry run of every line

Random weights, two shapes: Qwen2's (the whole head turned, NeoX) and GLM-4's (half of it, GPT-J).
keys      A session that is fed one token over and over has the same hidden state at every position, so its
          keys differ by their rotation alone: blocks moved back must equal those that the model made there.
          Printed beside: how far the two are apart where nothing was moved.
logits    One text through an engine that compacts 64 tokens at a time and through one that keeps every
          position, S = 0, so that only rounding differs: the logits at each chunk's end. Beside it, what the
          rounding of the same engine does alone: its logits against those of a finer one (float16 instead of
          bf16, a bf16 cache instead of fp8).
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.provenance import provenance
from engine.models.family import EngineRecipe
from engine.types import Finish, Work
from engine.vllm.environment import prepare_process, repair_torch_companions
from engine.vllm.settings import VllmSettings

WINDOW, SLACK, CHUNK, BLOCK = 512, 64, 64, 16
NUM_TOKENS = 3072  # of the text: 38 compactions
SHAPE: dict[str, Any] = dict(
    hidden_size=1024,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=128,
    intermediate_size=2048,
    vocab_size=2048,
    max_position_embeddings=8192,
    initializer_range=0.06,  # wide, so that attention is not uniform
    pad_token_id=0,
)
VARIANTS: tuple[tuple[str, bool, dict[str, Any]], ...] = (  # model, eager, further engine arguments
    ("Qwen2", False, {}),
    ("Qwen2", False, {"kv_cache_dtype": "fp8"}),
    ("Glm4", False, {}),
    ("Qwen2", True, {}),
)
KEYS_LIMIT = {"auto": 0.01, "fp8": 0.06}  # relative error that passes
NO_FLOAT16 = ("Glm4",)  # vLLM refuses it there: its logits have nothing finer to be held against
LOGITS_LIMIT = 1.5  # the same, over that of the engine's own rounding


def save(name: str, directory: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(5)
    config = getattr(transformers, f"{name}Config")(**SHAPE)
    getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16).save_pretrained(directory)


@contextmanager
def engine(
    directory: Path, device: Any, eager: bool, slack: int, dtype: str = "bfloat16", **overrides: Any
) -> Iterator[Any]:
    import torch

    from engine.vllm.core import SessionCore
    from engine.vllm.loading import load

    settings = VllmSettings(
        device=device,
        max_sessions=8,
        max_batch_tokens=512,
        kv_cache_bytes=1 << 28,
        gpu_memory_utilization=0.1,
        dtype=dtype,
        eager=eager or device == "cpu",
        window_tokens=WINDOW,
        max_sink_tokens=64,
        compaction_slack_tokens=slack,
    )
    recipe = EngineRecipe(directory, 8192, overrides={"skip_tokenizer_init": True, **overrides})
    core = SessionCore(load(recipe, settings), None)
    try:
        yield core
    finally:
        core.shutdown()
        del core
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def feed(core: Any, name: str, tokens: list[int]) -> int:
    """One session takes the tokens in, chunk by chunk; how often it was compacted."""
    num_compactions = evicted = 0
    for seq, start in enumerate(range(0, len(tokens), CHUNK)):
        core.submit(Work(name, 0, seq, tuple(tokens[start : start + CHUNK]), max_tokens=0))
        results = []
        while not results:
            core.step()
            results = core.take_results()
        if results[-1].finish is not Finish.FED:
            raise RuntimeError(f"token {start}: {results}")
        num_compactions += core._sessions[name].num_evicted > evicted
        evicted = core._sessions[name].num_evicted
    return num_compactions


def keys_error(core: Any, device: str) -> dict[str, float]:
    """Blocks 12 to 23 of a session of one token, moved to where 0 to 11 are; the largest layer's error."""
    import torch

    from engine.vllm.compaction.mover import KeyMover, _typed

    runner = core._core.model_executor.driver_worker.worker.model_runner
    feed(core, "one token", [17] * (24 * BLOCK))
    (request,) = core._scheduler.requests.values()
    (manager,) = core._scheduler.kv_cache_manager.coordinator.single_type_managers
    ids = [block.block_id for block in manager.req_to_blocks[request.request_id]]
    layers = [runner.compilation_config.static_forward_context[name] for name in _names(runner)]

    def keys(which: list[int]) -> list[Any]:
        where = torch.tensor(which, device=device)
        caches = [_typed(layer).float() for layer in layers]
        if device == "cpu":  # packed: a block's keys, then its values
            return [c.flatten(2)[where][..., : c.shape[2] * c.shape[3] // 2] for c in caches]
        return [c[where][..., : layer.head_size] for c, layer in zip(caches, layers, strict=True)]

    made, before = keys(ids[:12]), keys(ids[12:24])
    KeyMover(runner).move([(ids[12:24], 12 * BLOCK)])
    after = keys(ids[12:24])
    core.end("one token", 0)
    while core.has_work():
        core.step()

    def worst(found: list[Any]) -> float:
        return max(float((f - m).norm() / m.norm()) for f, m in zip(found, made, strict=True))

    return {"keys_error": worst(after), "keys_error_unmoved": worst(before)}


def _names(runner: Any) -> list[str]:
    return [name for group in runner.kv_cache_config.kv_cache_groups for name in group.layer_names]


def logits_of(core: Any, tokens: list[int]) -> tuple[Any, int]:
    """The logits at each chunk's end [chunks, vocabulary], and how often the session was compacted."""
    import torch

    model = core._core.model_executor.driver_worker.worker.model_runner.model
    recorded: list[Any] = []
    compute: Callable[..., Any] = model.compute_logits

    def record(hidden: Any, *args: Any) -> Any:
        logits = compute(hidden, *args)
        recorded.append(logits[:1].float().cpu())
        return logits

    model.compute_logits = record
    num_compactions = feed(core, "text", tokens)
    model.compute_logits = compute
    if len(recorded) != -(-len(tokens) // CHUNK):
        raise RuntimeError(f"{len(recorded)} steps for {len(tokens)} tokens in chunks of {CHUNK}")
    return torch.cat(recorded), num_compactions


class Runs:
    """The text's logits by engine; one that several rows compare with is started once."""

    def __init__(self, root: Path, device: str) -> None:
        import torch

        self.root, self.device = root, device
        generator = torch.Generator().manual_seed(1)
        self._text = torch.randint(10, 2000, (NUM_TOKENS,), generator=generator).tolist()
        self._kept: dict[Any, Any] = {}

    def moved(self, name: str, eager: bool, overrides: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """With compaction; and what is measured of it."""
        with engine(self.root / name, self.device, eager, SLACK, **overrides) as core:
            row: dict[str, Any] = dict(keys_error(core, self.device))
            logits, row["num_compactions"] = logits_of(core, self._text)
        return logits, row

    def kept(self, name: str, eager: bool, overrides: dict[str, Any], dtype: str = "bfloat16") -> Any:
        """Without. Of the same rounding only where it is as eager: compiled steps round elsewhere."""
        key = (name, eager, dtype, *overrides.items())
        if key not in self._kept:
            with engine(self.root / name, self.device, eager, 0, dtype, **overrides) as core:
                self._kept[key], _ = logits_of(core, self._text)
        return self._kept[key]


def study(runs: Runs, name: str, eager: bool, overrides: dict[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"model": name, "graphs": not eager, **overrides}
    started = time.perf_counter()
    moved, measured = runs.moved(name, eager, overrides)
    row |= measured
    kept = runs.kept(name, eager, overrides)
    pairs = [("compaction", moved, kept)]
    if overrides:
        pairs.append(("rounding", kept, runs.kept(name, eager, {})))
    elif name not in NO_FLOAT16 or runs.device == "cpu":
        finer = "float16" if runs.device == "cuda" else "float32"
        pairs.append(("rounding", kept, runs.kept(name, True, {}, finer)))
    first = (WINDOW + SLACK) // CHUNK
    for what, one, other in pairs:
        errors = (one - other).norm(dim=1) / other.norm(dim=1)
        row[f"logits_error_of_{what}"] = {
            "before": float(errors[:first].mean()),
            "first 10": float(errors[first : first + 10].mean()),
            "last 10": float(errors[-10:].mean()),
            "same top token": float((one.argmax(1) == other.argmax(1)).float().mean()),
        }
    late = [row[f"logits_error_of_{what}"]["last 10"] for what, _, _ in pairs]
    is_close = row["keys_error"] < KEYS_LIMIT[overrides.get("kv_cache_dtype", "auto")]
    row["passed"] = is_close and (len(late) == 1 or late[0] / late[1] < LOGITS_LIMIT)
    row["seconds"] = time.perf_counter() - started
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    faulthandler.register(signal.SIGTERM, chain=True)  # `timeout` shall tell where it hung
    prepare_process(options.device)
    repair_torch_companions()
    rows = []
    with tempfile.TemporaryDirectory() as root:
        for name in {variant[0]: None for variant in VARIANTS}:
            save(name, Path(root) / name)
        runs = Runs(Path(root), options.device)
        for name, eager, overrides in VARIANTS:
            if options.device == "cpu" and (overrides or eager):
                continue  # fp8 needs more of a CPU than this one may have
            rows.append(study(runs, name, eager, overrides))
            print(json.dumps(rows[-1], indent=1), flush=True)
            if options.out is not None:  # each time: what comes next may be killed
                result = provenance(options.device) | {"part": "moved_keys", "rows": rows}
                options.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(not all(row["passed"] for row in rows))


if __name__ == "__main__":
    main()
