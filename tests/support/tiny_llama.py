"""Writes a tiny random-weight Llama checkpoint, for engines that take text only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.models.family import EngineRecipe

VOCAB_SIZE = 256
MAX_POSITIONS = 4096


def build(directory: Path, **changes: Any) -> EngineRecipe:
    """Write it into `directory` (once); `changes` are fields of transformers' LlamaConfig."""
    config: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": 0.5,  # wide, so that answers vary and attention is no even mean
        "tie_word_embeddings": False,
    } | changes
    if not (directory / "config.json").is_file():
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(directory)
    overrides = {"skip_tokenizer_init": True}
    return EngineRecipe(directory, MAX_POSITIONS, dtype="float32", overrides=overrides)
