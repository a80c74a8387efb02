"""Every decoder with plain full attention: tiny ones with random weights against Hugging Face, float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.models.family import EngineRecipe
from engine.vllm.settings import VllmSettings
from tests.engine.vllm.sink_window.judging import judged_logits, rounded_mask, talk

pytestmark = pytest.mark.vllm

W, SINKS, BLOCK = 40, 11, 16
SIZES: dict[str, Any] = dict(
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=128,
    vocab_size=300,
    max_position_embeddings=512,
    initializer_range=0.2,  # wide, so that attention is not uniform
)
EXPERTS: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)


def save(name: str, directory: Path) -> Any:
    import transformers

    torch.manual_seed(2)
    sizes = SIZES | (EXPERTS if name == "Qwen3Moe" else {})
    if name == "Qwen2":
        sizes.pop("head_dim")
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    model.save_pretrained(directory)
    model.set_attn_implementation("eager")
    return model


@pytest.fixture(params=["Qwen2", "Qwen3", "Qwen3Moe", "Llama"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, Any]]:
    """Hugging Face's model, and an engine of the same weights."""
    from engine.vllm.core import SessionCore
    from engine.vllm.loading import load
    from tests.engine.vllm.stepper import Stepper

    judge = save(request.param, tmp_path)
    settings = VllmSettings(
        max_sessions=4, kv_cache_bytes=4 << 20, dtype="float32", window_tokens=W, max_sink_tokens=16
    )
    recipe = EngineRecipe(tmp_path, 512, overrides={"skip_tokenizer_init": True})
    core = load(recipe, settings)
    yield judge, Stepper(SessionCore(core, None))
    core.shutdown()


def test_logits_at_every_position(model):
    judge, stepper = model
    text = tuple((17 * i + i * i) % 290 + 5 for i in range(200))
    tokens, steps, logits = talk(stepper, text, [30, 1, 50, 17, 20, 40], 6, SINKS)
    assert len(tokens) > 4 * W
    mask = rounded_mask(steps, SINKS, W, BLOCK)
    expected = judged_logits(judge, tokens, mask)
    torch.testing.assert_close(logits, expected, atol=2e-3, rtol=1e-3)
    causal = judged_logits(judge, tokens, torch.ones_like(mask).tril())
    assert (logits - causal)[2 * W :].abs().max() > 0.1
