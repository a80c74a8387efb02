"""The model and the engine that the parts of on_device.py share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.models.family import EngineRecipe
from engine.types import Finish, Work
from engine.vllm.settings import VllmSettings

W, SINKS, BLOCK, SLACK, CHUNK = 64, 21, 16, 96, 128
VOCAB_SIZE = 2048


def save_model(directory: Path) -> EngineRecipe:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(5)
    config = Qwen2Config(
        hidden_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        intermediate_size=2048,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=4096,
        initializer_range=0.06,  # wide, so that attention is not uniform and positions show
    )
    model: Any = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(directory)
    return EngineRecipe(directory, 4096, overrides={"skip_tokenizer_init": True})


def make_core(recipe: EngineRecipe, device: Any, eager: bool, **changes: Any) -> Any:
    from engine.vllm.core import SessionCore
    from engine.vllm.loading import load

    given: dict[str, Any] = dict(
        max_sessions=34,
        max_batch_tokens=1024,
        kv_cache_bytes=1 << 28,
        block_size_tokens=BLOCK,
        window_tokens=W,
        max_sink_tokens=32,
        max_chunk_tokens=CHUNK,
        compaction_slack_tokens=SLACK,
        gpu_memory_utilization=0.1,  # vLLM wants so much to be free, though it takes what is said above
    )
    settings = VllmSettings(device=device, eager=eager, **(given | changes))
    core = SessionCore(load(recipe, settings), recipe.modality, recipe.layout)
    assert (core.limits.max_session_tokens is None) == (settings.compaction_slack_tokens > 0)
    return core


def run_work(core: Any, work: Work) -> tuple[int, ...]:
    """Step until it is finished; its tokens."""
    core.submit(work)
    tokens: list[int] = []
    while True:
        for result in core.take_results():
            assert result.finish is not Finish.REFUSED, result.error
            if result.session_id == work.session_id:
                tokens += result.token_ids
                if result.finish is not None:
                    return tuple(tokens)
        core.step()


def relative_error(found: Any, expected: Any) -> float:
    return round(float((found - expected).norm() / expected.norm()), 5)
