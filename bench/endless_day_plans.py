"""What endless_day.py runs: models, sizes, and what their sessions take in."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from engine.models.family import EngineRecipe, Family
from engine.types import SAMPLE_RATE, Features, Hearing, TurnMode

Chunk = tuple[tuple[int, ...], tuple[Features, ...]]  # tokens, and the features inside them


@dataclass(frozen=True)
class Plan:
    """What one run does."""

    model: str
    device: Literal["cpu", "cuda"]
    budget_s: float  # B: what one tick stands for
    num_sessions: int
    num_tokens: int  # taken in per tick; with audio, about as many
    num_decoded: int
    settings: dict[str, Any]
    with_audio: bool = False
    audio_every: int = 1  # ticks from one chunk of audio of a session to its next; tokens between


PLANS = {
    plan.model: plan
    for plan in (
        Plan("smollm2", "cpu", 2.0, 2, 4, 1, dict(kv_cache_bytes=256 << 20, max_batch_tokens=512)),
        Plan(
            "ultravox",
            "cpu",
            1.0,
            2,
            8,
            1,
            dict(kv_cache_bytes=32 << 20, window_tokens=256, max_sink_tokens=32, compaction_slack_tokens=128),
            with_audio=True,
        ),
        Plan("qwen7b", "cuda", 2.0, 16, 50, 1, dict(max_batch_tokens=1024)),
        # The encoder takes 7.6 ms an item, one after another: one session a tick hears.
        Plan(
            "qwen2.5-omni-7b",
            "cuda",
            2.0,
            8,
            50,
            1,
            dict(max_batch_tokens=1024),
            with_audio=True,
            audio_every=8,
        ),
    )
}
SMALL = dict(device="cpu", settings=dict(kv_cache_bytes=256 << 20, max_batch_tokens=512, window_tokens=512))
NUM_SMOLLM2_LAYERS = 4


def make_model(plan: Plan, directory: Path) -> tuple[EngineRecipe, Family | None]:
    """Write the model's files into `directory`. The family is that of sessions with audio."""
    is_small = plan.device == "cpu"  # of the two that are made for a GPU: a dry run
    if plan.model == "ultravox":
        from tests.support.ultravox_checkpoint import build
        from tests.support.ultravox_family import TinyUltravox

        family: Family = TinyUltravox(build(directory))
        return family.engine_recipe(), family
    if plan.with_audio:
        from bench import families_checkpoint
        from engine.models import published

        changes = None
        if is_small:
            from tests.support import tiny_omni

            changes = tiny_omni.changes(plan.model)
        families_checkpoint.write(plan.model, directory, changes)
        family = published.load(str(directory), device=plan.device)
        return replace(family.engine_recipe(), load_format="dummy"), family
    overrides = {"skip_tokenizer_init": True}
    if plan.model == "smollm2":
        return EngineRecipe(first_layers(directory), 8192, overrides=overrides), None
    from transformers import Qwen2Config

    from bench.windowed_engine_gpu import QWEN2_5_7B, TINY

    sizes: dict[str, Any] = TINY if is_small else QWEN2_5_7B
    Qwen2Config(**sizes, architectures=["Qwen2ForCausalLM"], dtype="bfloat16").save_pretrained(directory)
    length = sizes["max_position_embeddings"]
    return EngineRecipe(directory, length, load_format="dummy", overrides=overrides), None


def first_layers(directory: Path) -> Path:
    """SmolLM2 cut down to its first layers: the same code and shapes, a seventh of the time."""
    from safetensors.torch import load_file, save_file

    from engine.models import bundles
    from engine.models.prepare import prepare

    cache = Path(os.environ.get("METRONOME_CACHE_DIR", "~/.cache/metronome")).expanduser()
    whole = prepare(bundles.SMOLLM2, cache)
    config = json.loads((whole / "config.json").read_text()) | {"num_hidden_layers": NUM_SMOLLM2_LAYERS}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    dropped = tuple(f"model.layers.{i}." for i in range(NUM_SMOLLM2_LAYERS, 30))
    weights = load_file(next(whole.glob("*.safetensors")))
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith(dropped)}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


class Chunks:
    """What the sessions take in: made once, used in turn, so that the driver's own cost is small and flat."""

    def __init__(self, plan: Plan, family: Family | None) -> None:
        self._audio_every = plan.audio_every
        self._tokens: list[Chunk] = [
            (tuple(10 + (37 * number + 11 * i) % 2000 for i in range(plan.num_tokens)), ())
            for number in range(64)
        ]
        self._audio = [] if family is None else [heard(family, number) for number in range(16)]

    def take(self, session: int, tick: int) -> Chunk:
        is_audio = self._audio and (session + tick) % self._audio_every == 0
        made = self._audio if is_audio else self._tokens
        return made[(31 * session + tick // self._audio_every) % len(made)]


def heard(family: Family, seed: int) -> Chunk:
    """A whole turn of one budget's audio, as the family takes it in continuous mode."""
    mode = TurnMode.CONTINUOUS
    num_samples = round(family.info.budget_s * SAMPLE_RATE)
    audio = np.random.default_rng(seed).normal(0, 0.1, num_samples).astype(np.float32)
    (intake,) = family.hear([Hearing("a", family.new_ear(), audio, True, mode)])
    opening = family.open_turn(mode)
    features = tuple(replace(item, offset=item.offset + len(opening)) for item in intake.features)
    return (*opening, *intake.token_ids, *family.close_turn(mode)), features
