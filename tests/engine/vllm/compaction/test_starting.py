"""Engines whose sessions cannot be compacted, or are to end at a cap."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.models.family import EngineRecipe
from engine.types import Finish, Work
from engine.vllm.settings import VllmSettings
from tests.support import tiny_llama

pytestmark = pytest.mark.vllm

SMALL = dict(max_sessions=4, kv_cache_bytes=8 << 20, window_tokens=64, max_sink_tokens=16)


@contextmanager
def started(recipe: EngineRecipe, **changes: Any) -> Iterator[Any]:
    from engine.vllm.core import SessionCore
    from engine.vllm.loading import load

    given: dict[str, Any] = SMALL | {"compaction_slack_tokens": 64} | changes
    core = SessionCore(load(recipe, VllmSettings(**given)), None)
    try:
        yield core
    finally:
        core.shutdown()


def run(core: Any, seq: int, num_tokens: int) -> Any:
    core.submit(Work("a", 0, seq, tuple(5 + i % 200 for i in range(num_tokens))))
    while True:
        core.step()
        for result in core.take_results():
            return result


def positions_learned(directory: Path) -> EngineRecipe:
    """A tiny GPT-2: its positions are embeddings, and its keys know nothing of them."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=256, n_positions=1024, n_embd=64, n_layer=2, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(directory)
    return EngineRecipe(directory, 1024, dtype="float32", overrides={"skip_tokenizer_init": True})


def test_a_model_whose_keys_cannot_be_moved_keeps_its_length_and_says_so_once(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "engine"), started(positions_learned(tmp_path)) as core:
        said = [record.getMessage() for record in caplog.records if "compacted" in record.getMessage()]
        (line,) = said
        assert line.startswith("sessions end at 1023 tokens, for they cannot be compacted: ")
        assert "no rotary module" in line
        assert core.limits.max_session_tokens == 1023
        assert run(core, 1, 700).finish is Finish.FED
        assert run(core, 2, 323).finish is Finish.FED
        core.submit(Work("a", 0, 3, (5,)))
        (refused,) = core.take_results()
        assert "beyond 1023 tokens" in refused.error


def test_a_window_wider_than_the_model_was_trained_for_is_said_too(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "engine"):
        with started(tiny_llama.build(tmp_path), window_tokens=4000, kv_cache_bytes=16 << 20) as core:
            assert core.limits.max_session_tokens == tiny_llama.MAX_POSITIONS - 1
    assert "need more than the 4096 positions the model was trained for" in caplog.text


def test_a_cap_ends_compacted_sessions_by_all_their_tokens(tmp_path):
    with started(tiny_llama.build(tmp_path), max_session_tokens=2000) as core:
        assert core.limits.max_session_tokens == 2000
        assert core._scheduler.max_model_len < 300
        for seq in range(19):
            assert run(core, seq, 100).num_kv_tokens == 100 * (seq + 1)
        core.submit(Work("a", 0, 99, (5,) * 101))
        (refused,) = core.take_results()
        assert refused.finish is Finish.REFUSED and "beyond 2000 tokens: 1900 are held" in refused.error


def test_without_compaction_a_windowed_session_goes_back_only_while_nothing_was_freed(tmp_path):
    """A query further back would see blocks that are another's by now."""
    with started(tiny_llama.build(tmp_path), compaction_slack_tokens=0) as core:
        assert core.limits.max_dropped_tokens == 0
        assert run(core, 1, 60).finish is Finish.FED
        core.submit(Work("a", 0, 2, (5,) * 140, keep_tokens=40))
        core.step()
        core.step()
        (fed,) = core.take_results()
        assert (fed.finish, fed.num_kv_tokens) == (Finish.FED, 180)
        core.submit(Work("a", 0, 3, (5,), keep_tokens=150))
        (refused,) = core.take_results()
        assert "cannot keep 150: what comes before them was freed" in refused.error


@pytest.mark.parametrize("kv", ["unbounded", "windowed"])
def test_after_going_back_the_answer_is_that_of_a_session_that_never_went(tmp_path, kv):
    """Short of the window nothing is freed: no compaction is needed, and nothing may tell the two apart."""
    first, second = tuple(range(5, 60)), tuple(range(100, 120))
    answers = {}
    with started(tiny_llama.build(tmp_path), kv=kv) as core:
        for name, fed, keep in (("back", first, 30), ("straight", first[:30], None)):
            core.submit(Work(name, 0, 1, fed))
            while not core.take_results():
                core.step()
            core.submit(Work(name, 0, 2, second, keep_tokens=keep, max_tokens=8))
            results = []
            while not results or results[-1].finish is None:
                core.step()
                results += core.take_results()
            assert results[-1].num_kv_tokens == 30 + len(second) + 7
            answers[name] = [token for result in results for token in result.token_ids]
        assert answers["back"] == answers["straight"]
        used = core.stats().kv_blocks_used
        core.end("back", 0)
        assert core.stats().kv_blocks_used == used / 2  # the forgotten tokens' blocks were given back
