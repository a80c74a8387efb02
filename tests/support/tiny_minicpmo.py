"""Writes MiniCPM-o checkpoints: tiny ones with random weights, full-size ones without any.

A tiny one is of the true architecture with the real tokenizer: 2 layers in the encoder, 2 in the backbone,
both narrow, float32. A full-size one is for `load_format="dummy"`.

    python -m tests.support.tiny_minicpmo DIRECTORY [2.6 | 4.5]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench import minicpmo_checkpoint
from tests.support.npm import qwen_tokenizer

_TINY: dict[str, Any] = {
    "torch_dtype": "float32",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "audio_config": {
        "model_type": "whisper",
        "d_model": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 256,
        "num_mel_bins": 80,
        "max_source_positions": 1500,
    },
}
_HEADS = {
    "2.6": {"num_attention_heads": 2, "num_key_value_heads": 1},
    "4.5": {"num_attention_heads": 4, "num_key_value_heads": 2},
}
_STD = 0.2  # wide, so that greedy answers vary and depend on the audio


def changes(version: str) -> dict[str, Any]:
    """What in config.json makes a model tiny."""
    return _TINY | _HEADS[version]


def write_checkpoint(directory: Path, version: str = "4.5", *, full_size: bool = False) -> Path:
    """Write it; returns `directory`. The tokenizer of a full-size one is of single bytes."""
    if full_size:
        return minicpmo_checkpoint.write(version, directory)
    tokenizer = json.loads(qwen_tokenizer("3" if version == "4.5" else "2.5").read_text())
    config = minicpmo_checkpoint.CONFIGS[version] | changes(version)
    minicpmo_checkpoint.write(version, directory, config, tokenizer)
    _write_weights(directory, config)
    return directory


def backbone(config: dict[str, Any]) -> Any:
    """transformers' own model of the language model in it, with random weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    kinds = {"2.6": (Qwen2Config, Qwen2ForCausalLM), "4.5": (Qwen3Config, Qwen3ForCausalLM)}
    config_class, model_class = kinds[config["version"]]
    left_out = {"architectures", "auto_map", "model_type", "audio_config", "version", "torch_dtype"}
    values = {name: value for name, value in config.items() if name not in left_out}
    return model_class(config_class(**values, initializer_range=_STD))


def _write_weights(directory: Path, config: dict[str, Any]) -> None:
    """Under the names of the published checkpoints, those of the towers that are not served included."""
    import torch
    from safetensors.torch import save_file
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    torch.manual_seed(0)
    encoder = WhisperEncoder(WhisperConfig(**config["audio_config"], init_std=_STD))
    hidden, width = config["hidden_size"], config["audio_config"]["encoder_ffn_dim"] // 4
    weights = {
        "audio_projection_layer.linear1.weight": torch.randn(hidden, width) * _STD,
        "audio_projection_layer.linear1.bias": torch.randn(hidden) * _STD,
        "audio_projection_layer.linear2.weight": torch.randn(hidden, hidden) * _STD,
        "audio_projection_layer.linear2.bias": torch.randn(hidden) * _STD,
        "vpm.embeddings.patch_embedding.bias": torch.zeros(4),
        "resampler.query": torch.zeros(4),
        "tts.emb_text.weight": torch.zeros(4),
    }
    weights |= {f"apm.{name}": tensor for name, tensor in encoder.state_dict().items()}
    weights |= {f"llm.{name}": tensor for name, tensor in backbone(config).state_dict().items()}
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()}, directory / "model.safetensors"
    )


if __name__ == "__main__":
    from engine.vllm.environment import prepare_process, repair_torch_companions

    prepare_process("cpu")
    repair_torch_companions()
    print(write_checkpoint(Path(sys.argv[1]), *sys.argv[2:3]))
