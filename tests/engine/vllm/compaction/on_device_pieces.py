"""Works with audio that are taken in piece by piece, against the same works uncut.

Two sessions hear different audio side by side, several items in every work. Cut: a turn holds SLACK tokens,
so each work is taken in as several, and on CUDA what leaves the window is compacted away. Uncut: the same
model with a slack of 0, which takes works in whole and keeps every position. Without sinks only rounding
differs.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.models.family import EngineRecipe
from engine.types import SAMPLE_RATE, Features, Finish, Hearing, TurnMode, Work
from tests.engine.vllm.compaction.on_device_engine import SLACK, make_core, relative_error
from tests.support.logits_watch import LogitsWatch

ITEMS_PER_WORK, ITEM_S = 6, 1.3  # about 200 tokens: three pieces
MAX_GROWTH = 2.0  # of bf16's own error: both sides have one, and moved keys are rounded once more


@dataclass(frozen=True)
class Heard:
    logits: Any  # [works of both sessions, vocabulary] at each work's end
    num_tokens: int
    num_turns: int  # in vLLM
    num_compactions: int


def pieces(_recipe: EngineRecipe, device: str, eager: bool) -> dict[str, Any]:
    """Qwen2.5-Omni's names and paths, tiny; M-RoPE, audio encoder and all."""
    from engine.models import published
    from tests.support import tiny_omni

    on_gpu = device == "cuda"
    dtype = "bfloat16" if on_gpu else "float32"
    with tempfile.TemporaryDirectory() as directory:
        tiny_omni.build_untokenized("qwen2.5-omni-7b", Path(directory) / "omni", dtype)
        family = published.load(f"{directory}/omni")
        # On the CPU nothing may leave the window: there a chunk's mask is that of its first query.
        window, num_works = (256, 8) if on_gpu else (1024, 3)
        heard = {name: audio_works(family, seed, num_works) for seed, name in enumerate("ab")}
        wrong = {name: [with_first_audio(work) for work in works] for name, works in heard.items()}

        def engine(slack: int, dtype: str) -> Any:
            changes = dict(window_tokens=window, compaction_slack_tokens=slack, dtype=dtype)
            return make_core(family.engine_recipe(), device, eager, **changes)

        core = engine(SLACK, dtype)
        cut, misheard = hear(core, heard), hear(core, wrong, generation=1)
        core.shutdown()
        core = engine(0, dtype)
        uncut = hear(core, heard)
        core.shutdown()
        finer = None
        if on_gpu:
            core = engine(0, "float16")
            finer = hear(core, heard)
            core.shutdown()
    row: dict[str, Any] = {
        "works": len(cut.logits),
        "tokens": cut.num_tokens,
        "turns": cut.num_turns,
        "compactions": cut.num_compactions,
        "error": relative_error(cut.logits, uncut.logits),
        "error_of_rounding": 1e-4 if finer is None else relative_error(uncut.logits, finer.logits),
        "error_if_misheard": relative_error(misheard.logits, uncut.logits),
    }
    assert cut.num_turns >= 3 * uncut.num_turns == 3 * row["works"], row
    assert not on_gpu or cut.num_compactions >= 20, row
    assert row["error"] < MAX_GROWTH * row["error_of_rounding"], row
    assert row["error_if_misheard"] > 3 * row["error"], row
    return row


def audio_works(family: Any, seed: int, number: int) -> list[Work]:
    import numpy as np

    rng, ear, works = np.random.default_rng(seed), family.new_ear(), []
    for seq in range(number):
        tokens: tuple[int, ...] = (100 + seq,)
        features: tuple[Features, ...] = ()
        while len(features) < ITEMS_PER_WORK:
            audio = rng.normal(0, 10 ** rng.uniform(-2, 0), round(ITEM_S * SAMPLE_RATE)).astype(np.float32)
            (intake,) = family.hear([Hearing("a", ear, audio, False, TurnMode.MANUAL)])
            features += tuple(replace(f, offset=f.offset + len(tokens)) for f in intake.features)
            tokens += intake.token_ids
        works.append(Work("", 0, seq, tokens, features=features, max_tokens=1))
    return works


def with_first_audio(work: Work) -> Work:
    """What a piece would hear whose encoder keys were those of the piece before."""
    alike = {item.num_tokens: item.tensors for item in reversed(work.features)}
    return replace(
        work, features=tuple(replace(item, tensors=alike[item.num_tokens]) for item in work.features)
    )


def hear(core: Any, works: dict[str, list[Work]], generation: int = 0) -> Heard:
    """All sessions at once, work by work, beside one that decodes; nothing is left afterwards."""
    from tests.engine.vllm.stepper import Stepper

    turns: list[str] = []
    build = core._builder.build
    core._builder.build = lambda name, work: (turns.append(name), build(name, work))[1]
    watches = {name: LogitsWatch(core, name) for name in works}
    core.submit(Work("other", generation, 0, tuple(range(5, 300)), max_tokens=3000))
    ends: dict[str, list[int]] = {name: [] for name in works}
    for together in zip(*works.values(), strict=True):
        for name, work in zip(works, together, strict=True):
            core.submit(replace(work, session_id=name, generation=generation))
        waiting = set(works)
        while waiting:
            core.step()
            for result in core.take_results():
                assert result.finish is not Finish.REFUSED, result.error
                if result.session_id in waiting and result.finish is not None:
                    ends[result.session_id].append(result.num_kv_tokens)
                    waiting.remove(result.session_id)
    for name in (*works, "other"):
        core.end(name, generation)
    while core.has_work():
        core.step()
    Stepper(core).check_empty()
    core._builder.build = build
    for watch in watches.values():
        watch.close()
    import torch

    logits = torch.stack([watches[name].logits[end] for name in works for end in ends[name]])
    num_turns = sum(not name.startswith("other:") for name in turns)
    num_tokens = sum(ended[-1] for ended in ends.values())
    return Heard(logits, num_tokens, num_turns, sum(watch.num_moves for watch in watches.values()))
