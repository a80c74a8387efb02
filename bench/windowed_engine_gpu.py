"""The whole engine on a GPU: windowed against unbounded attention, as sessions grow older.

    VLLM_USE_FLASHINFER_SAMPLER=0 python -m bench.windowed_engine_gpu [--out DIR]      one H200
    python -m bench.windowed_engine_gpu --small              a dry run of every line on the CPU

Qwen2.5-7B's shape with random weights, bf16, CUDA graphs: W = 1,024, S = 16 and our kernel, against
kv=unbounded, where vLLM takes FlashAttention-3. 256 sessions grow from 1,024 to 8,192 tokens; at each age
the decode step of all and of 64 of them is measured, and a mixed step, in which a quarter of the sessions
takes in chunks of 50 tokens. At the last age the kernels of a step are timed, too. Further parts: "piecewise"
(windowed, attention outside of the mixed steps' graphs) and "fp8" (windowed, an fp8 cache). One process and
one JSON per part. bench/windowed_engine_all.py runs these and the other checks in one GPU call.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from engine.models.family import EngineRecipe
from engine.types import Work
from engine.vllm.environment import prepare_process, repair_torch_companions
from engine.vllm.settings import VllmSettings, graph_sizes


@dataclass(frozen=True)
class Plan:
    device: Literal["cpu", "cuda"]
    model: dict[str, Any]
    window: int
    ages: tuple[int, ...]
    batches: tuple[int, int]  # all sessions, and some of them
    num_steps: int  # measured, per point
    max_batch_tokens: int
    kv_cache_bytes: int | None


QWEN2_5_7B: dict[str, Any] = dict(
    hidden_size=3584,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    intermediate_size=18_944,
    vocab_size=152_064,
    max_position_embeddings=32_768,
    rope_theta=1_000_000.0,
)
FULL = Plan("cuda", QWEN2_5_7B, 1024, (1024, 2048, 4096, 8192), (256, 64), 40, 8192, None)
TINY = dict(
    hidden_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=512,
    vocab_size=2048,
    max_position_embeddings=4096,
)
SMALL = Plan("cpu", TINY, 64, (64, 128), (12, 4), 12, 256, 1 << 26)
SINKS, CHUNK = 16, 50
CHUNK_GROUPS = 4  # a group takes in a chunk per step, so each session takes one every so many steps
HEADROOM = 2048  # tokens beyond the last age that measuring itself adds
PROFILED_STEPS = 12


@dataclass(frozen=True)
class Variant:
    kv: Literal["windowed", "unbounded"]
    settings: dict[str, Any] = field(default_factory=dict)
    mode: str | None = None  # of CUDA graphs


PARTS = {
    "windowed": Variant("windowed"),
    "unbounded": Variant("unbounded"),
    "piecewise": Variant("windowed", mode="FULL_AND_PIECEWISE"),
    "fp8": Variant("windowed", {"kv_dtype": "fp8"}),
}
KINDS = ("decode", "mixed")
GROUPS = {  # of kernels, by what their names contain
    "attention": ("decode_kernel", "mixed_kernel", "flash", "unified_attention"),
    "KV write": ("reshape_and_cache",),
    "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "cublas"),
    "copies": ("memcpy", "memset"),
    "compiled small kernels": ("triton_",),
}


class Room:
    """An engine and its sessions, all of one age."""

    def __init__(self, recipe: EngineRecipe, variant: Variant, plan: Plan) -> None:
        from engine.vllm.core import SessionCore
        from engine.vllm.loading import load

        self.plan = plan
        settings = VllmSettings(
            device=plan.device,
            max_sessions=plan.batches[0],
            max_session_tokens=plan.ages[-1] + HEADROOM,
            max_batch_tokens=plan.max_batch_tokens,
            kv_cache_bytes=plan.kv_cache_bytes,
            gpu_memory_utilization=0.92,
            kv=variant.kv,
            window_tokens=plan.window,
            max_sink_tokens=SINKS,
            compaction_slack_tokens=0,
            **variant.settings,
        )
        if variant.mode is not None and plan.device == "cuda":
            sizes = graph_sizes(plan.max_batch_tokens)
            graphs = {"cudagraph_mode": variant.mode, "cudagraph_capture_sizes": sizes}
            recipe = replace(recipe, overrides=recipe.overrides | {"compilation_config": graphs})
        started = time.perf_counter()
        self.core = SessionCore(load(recipe, settings), None)
        self.load_s = time.perf_counter() - started
        self.blocks_per_session = self.core.limits.blocks_per_session
        # What is reserved per session is not the question here: fill the pool by hand.
        self.core.limits = replace(self.core.limits, blocks_per_session=1)
        self.names = [f"s{number}" for number in range(plan.batches[0])]
        self.ages = dict.fromkeys(self.names, 0)
        self.num_tokens = 0  # of all sessions when the last measured step had ended

    def fits(self, age: int) -> bool:
        """Whether all the sessions there are can have this age and measure."""
        limits = self.core.limits
        blocks = -(-(age + HEADROOM // 2) // limits.block_size_tokens)
        return len(self.names) * min(blocks, self.blocks_per_session) <= limits.num_kv_blocks

    def grow(self, age: int) -> float:
        """Bring every session to `age` tokens; seconds it took."""
        started = time.perf_counter()
        for name in self.names:
            self.submit(name, age - self.ages[name])
        self.drain()
        return time.perf_counter() - started

    def submit(self, name: str, num_tokens: int, max_tokens: int = 0) -> None:
        if num_tokens <= 0:
            return
        start = self.ages[name]
        tokens = tuple((31 * position + 7) % 2000 + 10 for position in range(start, start + num_tokens))
        self.core.submit(Work(name, 0, 0, tokens, num_head_tokens=SINKS, max_tokens=max_tokens))

    def drain(self) -> None:
        while self.core.has_work():
            self.core.step()
            self.take()

    def take(self) -> set[str]:
        """Note the sessions' ages; those whose work ended."""
        finished = set()
        for result in self.core.take_results():
            if result.error is not None:
                raise RuntimeError(f"{result.session_id}: {result.error}")
            self.ages[result.session_id] = result.num_kv_tokens
            if result.finish is not None:
                finished.add(result.session_id)
        return finished

    def keep(self, number: int) -> None:
        for name in self.names[number:]:
            self.core.end(name, 0)
        self.names = self.names[:number]
        self.drain()

    def steps(self, names: Sequence[str], kind: str, number: int) -> Iterator[float]:
        """Milliseconds from result to result while these sessions decode, the others parked.

        Mixed: a quarter of them takes in chunks meanwhile, one group of four in each step.
        """
        chunkers = names[-(len(names) // 4) :] if kind == "mixed" else []
        groups = [chunkers[number::CHUNK_GROUPS] for number in range(CHUNK_GROUPS)]
        idle = set(chunkers)
        for name in names[: len(names) - len(chunkers)]:
            self.submit(name, 1, max_tokens=number + 12)
        for step in range(number):
            for name in groups[step % CHUNK_GROUPS]:
                if name in idle:
                    idle.discard(name)
                    self.submit(name, CHUNK)
            yield self.timed_step()
            idle |= self.take() & set(chunkers)
        self.num_tokens = sum(self.ages[name] for name in self.names)  # what follows is not measured
        self.drain()

    def step_ms(self, names: Sequence[str], kind: str) -> list[float]:
        return list(self.steps(names, kind, self.plan.num_steps + 6))[5:-1]

    def kernels(self, names: Sequence[str], kind: str) -> dict[str, Any]:
        """Milliseconds of a step by kind of kernel, measured by torch's profiler; and the longest kernels."""
        from torch.profiler import ProfilerActivity, profile

        on_gpu = self.plan.device == "cuda"
        steps = self.steps(names, kind, PROFILED_STEPS + 8)
        list(islice(steps, 6))
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
            times = list(islice(steps, PROFILED_STEPS))
        list(steps)
        spent: Counter[str] = Counter()
        for event in profiler.key_averages():
            total = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            spent[event.key] += total / 1e3 / PROFILED_STEPS
        groups: Counter[str] = Counter()
        for name, ms in spent.items():
            found = (group for group, parts in GROUPS.items() if any(part in name.lower() for part in parts))
            groups[next(found, "other")] += ms
        return {
            "step_ms": round(statistics.median(times), 3),
            "busy_ms": round(sum(groups.values()), 3),
            "groups_ms": {group: round(ms, 3) for group, ms in groups.most_common()},
            "longest_ms": {name[:100]: round(ms, 3) for name, ms in spent.most_common(16)},
        }

    def timed_step(self) -> float:
        started = time.perf_counter()
        self.core.step()  # returns with a batch's results, so its device work is done
        return 1e3 * (time.perf_counter() - started)


def measure(recipe: EngineRecipe, part: str, plan: Plan) -> Iterator[dict[str, Any]]:
    variant = PARTS[part]
    room = Room(recipe, variant, plan)
    common = {"part": part, "kv": variant.kv}
    limits = room.core.limits
    yield common | {
        "kind": "limits",
        "load_s": round(room.load_s, 1),
        "num_kv_blocks": limits.num_kv_blocks,
        "block_size": limits.block_size_tokens,
        "blocks_per_session": room.blocks_per_session,
        "sessions": limits.num_kv_blocks // room.blocks_per_session,
    }
    for age in plan.ages:
        if not room.fits(age):
            yield common | {"age": age, "batch": len(room.names), "kind": "does not fit"}
            room.keep(plan.batches[1])
        grow_s = room.grow(age)
        used = room.core.stats().kv_blocks_used
        points = [(size, kind) for size in plan.batches if size <= len(room.names) for kind in KINDS]
        for batch, kind in points:
            before = sum(room.ages[name] for name in room.names)
            times = room.step_ms(room.names[:batch], kind)
            yield (
                common
                | {"age": age, "batch": batch, "kind": kind}
                | spread(times)
                | {"tokens_per_step": round((room.num_tokens - before) / (plan.num_steps + 6))}
                | {"kv_blocks_used": used, "grow_s": round(grow_s, 1)}
            )
        if age == plan.ages[-1]:
            for batch, kind in points:
                found = room.kernels(room.names[:batch], kind)
                yield common | {"age": age, "batch": batch, "kind": f"{kind}, kernels"} | found
    room.core.shutdown()


def spread(values: list[float]) -> dict[str, Any]:
    deciles = statistics.quantiles(values, n=10)
    return {
        "step_ms": round(statistics.median(values), 3),
        "mean_ms": round(statistics.mean(values), 3),
        "p10_ms": round(deciles[0], 3),
        "p90_ms": round(deciles[8], 3),
        "steps": len(values),
    }


def write_config(directory: Path, shape: dict[str, Any]) -> None:
    """A checkpoint of nothing but its configuration: load_format=dummy makes up the weights."""
    from transformers import Qwen2Config

    directory.mkdir(parents=True)
    config = Qwen2Config(**shape).to_dict() | {"architectures": ["Qwen2ForCausalLM"], "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    parser.add_argument("--small", action="store_true", help="tiny shapes on the CPU: a dry run")
    parser.add_argument("--parts", nargs="+", default=["windowed", "unbounded"], choices=PARTS)
    parser.add_argument("--ages", nargs="+", type=int, help="tokens; default 1024 2048 4096 8192")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if len(options.parts) > 1:  # each in a process of its own: a failure stays alone
        for part in options.parts:
            arguments = ["--parts", part, "--out", str(options.out)] + ["--small"] * options.small
            arguments += ["--ages", *map(str, options.ages)] if options.ages else []
            subprocess.run([sys.executable, "-m", "bench.windowed_engine_gpu", *arguments], check=False)
        return
    plan = SMALL if options.small else FULL
    if options.ages:
        plan = replace(plan, ages=tuple(options.ages))
    prepare_process(plan.device)
    repair_torch_companions()
    write(options.parts[0], plan, options.out)


def write(part: str, plan: Plan, out: Path) -> None:
    """Measure, and write after each point what there is so far."""
    import torch

    name = torch.cuda.get_device_name() if plan.device == "cuda" else "cpu"
    result: dict[str, Any] = {"part": part, "machine": f"{name}, torch {torch.__version__}"}
    result |= {"model": plan.model, "window": plan.window, "sinks": SINKS, "chunk": CHUNK, "rows": []}
    with tempfile.TemporaryDirectory() as directory:
        write_config(Path(directory) / "shape", plan.model)
        recipe = EngineRecipe(
            Path(directory) / "shape",
            plan.model["max_position_embeddings"],
            load_format="dummy",
            overrides={"skip_tokenizer_init": True},
        )
        for row in measure(recipe, part, plan):
            print(row, flush=True)
            result["rows"].append(row)
            (out / f"windowed_engine_{part}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
