"""SmolLM2 in the windowed engine against Hugging Face's SmolLM2 under an explicit 4-D mask, float32, W = 64.

Both compute every position of the same tokens: chunked appends of many sizes, decoded answers, sessions side
by side. On the CPU the mask is the rounded one, in which a chunk's queries all see back to the start of the
block where its first query begins to see.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models import bundles
from engine.models.family import EngineRecipe
from engine.models.prepare import prepare
from engine.types import Finish
from engine.vllm.settings import VllmSettings
from tests.engine.vllm.sink_window.judging import judged_logits, rounded_mask, talk

pytestmark = pytest.mark.vllm

W, SINKS, BLOCK, CHUNK = 64, 16, 16, 512
SETTINGS = VllmSettings(
    max_sessions=8,
    kv_cache_bytes=128 << 20,
    dtype="float32",
    window_tokens=W,
    max_sink_tokens=SINKS,
    max_chunk_tokens=CHUNK,
    compaction_slack_tokens=0,  # positions stay what they are
)
TEXT = """It is a truth universally acknowledged, that a single man in possession of a good fortune, must be
in want of a wife. However little known the feelings or views of such a man may be on his first
entering a neighbourhood, this truth is so well fixed in the minds of the surrounding families, that
he is considered as the rightful property of some one or other of their daughters. "My dear Mr.
Bennet," said his lady to him one day, "have you heard that Netherfield Park is let at last?" Mr.
Bennet replied that he had not. "But it is," returned she; "for Mrs. Long has just been here, and
she told me all about it." Mr. Bennet made no answer. "Do not you want to know who has taken it?"
cried his wife impatiently. "You want to tell me, and I have no objection to hearing it." This was
invitation enough."""


@pytest.fixture(scope="session")
def llm_dir() -> Path:
    cache_dir = os.environ.get("METRONOME_CACHE_DIR", "~/.cache/metronome")
    return prepare(bundles.SMOLLM2, Path(cache_dir).expanduser())


@pytest.fixture(scope="module")
def engine_core(llm_dir: Path) -> Iterator:
    from engine.vllm.loading import load

    core = load(EngineRecipe(llm_dir, 8192), SETTINGS)
    yield core
    core.shutdown()


@pytest.fixture(scope="module", params=["sync"])
def module_stepper(engine_core):
    from engine.vllm.core import SessionCore
    from tests.engine.vllm.stepper import Stepper

    return Stepper(SessionCore(engine_core, None))


@pytest.fixture(scope="module")
def judge(llm_dir: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(llm_dir, dtype=torch.float32, attn_implementation="eager")


@pytest.fixture(scope="module")
def text(llm_dir: Path) -> tuple[int, ...]:
    from tokenizers import Tokenizer

    return tuple(Tokenizer.from_file(str(llm_dir / "tokenizer.json")).encode(TEXT).ids)


@pytest.mark.parametrize(
    "sizes,max_tokens",
    [([16, 33, 1, 64, 2, 17, 15, 20], 0), ([20, 40, 3, 30, 1, 12], 8), ([168], 0)],
    ids=["appends", "answers", "one chunk"],
)
def test_logits_at_every_position(stepper, judge, text, sizes, max_tokens):
    tokens, steps, logits = talk(stepper, text, sizes, max_tokens, SINKS)
    assert sum(steps) == len(tokens) == len(logits) > 2 * W
    mask = rounded_mask(steps, SINKS, W, BLOCK)
    expected = judged_logits(judge, tokens, mask)
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-3)
    causal = judged_logits(judge, tokens, torch.ones_like(mask).tril())
    if len(sizes) > 1:  # in one chunk every query sees all that it brought along
        assert (logits - causal)[2 * W :].abs().max() > 0.5  # the mask is no matter of rounding


def test_sessions_side_by_side_at_different_ages(stepper, judge, text):
    from tests.engine.vllm.sink_window import recording

    names, fed = ("a", "b", "c"), {"a": (150, 1), "b": (30, 1), "c": (90, 70)}
    engine_core = stepper.core._core
    works = [replace(stepper.work(name, text[: fed[name][0]]), num_head_tokens=SINKS) for name in names]
    assert stepper.run(*works) == [Finish.FED] * 3
    last = [
        replace(stepper.work(name, text[fed[name][0] : sum(fed[name])]), num_head_tokens=SINKS)
        for name in names
    ]
    with recording.hidden_states(engine_core) as recorded:
        assert stepper.run(*last) == [Finish.FED] * 3
    (step,) = recorded
    with torch.inference_mode():
        logits = recording.runner_of(engine_core).model.compute_logits(step)
    rows = recording.runner_of(engine_core).input_batch.req_ids
    start = 0
    for request_id in rows:
        name = request_id.split(":")[0]
        done, new = fed[name]
        mask = rounded_mask([done, new], SINKS, W, BLOCK)
        expected = judged_logits(judge, list(text[: done + new]), mask)[done:]
        torch.testing.assert_close(logits[start : start + new], expected, atol=2e-3, rtol=1e-3)
        start += new


def test_kv_stays_flat_up_to_the_trained_length(stepper, text):
    limits = stepper.core.limits
    assert limits.max_session_tokens == 8191
    prompt = (text * 50)[: limits.max_session_tokens - 20]
    used, done = [], 0
    while done < len(prompt):
        chunk = prompt[done : done + CHUNK]
        assert stepper.run(replace(stepper.work("a", chunk), num_head_tokens=SINKS)) == [Finish.FED]
        done += len(chunk)
        used.append(stepper.core.stats().kv_blocks_used)
    answer = replace(stepper.work("a", text[:1], 19), num_head_tokens=SINKS)
    assert stepper.run(answer) == [Finish.LENGTH]
    assert stepper.final(answer).num_kv_tokens == 8191 - 1
    assert max(used) <= 1 + W // BLOCK + 1
    assert limits.blocks_per_session == 1 + -(-(W - 1 + CHUNK - 1) // BLOCK) + 1
