"""Checkpoint directories of the published models' architecture, without their weights.

What vLLM and our families read of a checkpoint: config.json, preprocessor, tokenizer, chat template. The
sizes are the published ones, or tiny ones for tests; weights are vLLM's random ones (`load_format="dummy"`)
or those that tests/support/tiny_omni.py adds. No hub was reachable when this was written. Where the values
come from:
- Qwen2.5-Omni-7B: the defaults of transformers' config classes; the same in cpehle/tyr (below). Token ids,
  preprocessor and chat template: transformers, tests/models/qwen2_5_omni/.
- Qwen2.5-Omni-3B: cpehle/tyr, Tyr/Model/Qwen25Omni/Config.lean ("from HF config.json"). Whether its word
  embeddings are tied could not be seen; here they are not.
- Qwen3-Omni-30B-A3B, whose defaults in transformers are not the published values: a public print of the
  Instruct checkpoint's Qwen3OmniMoeConfig, token ids included; layers, heads and experts also in
  keras-team/keras-hub, qwen3_omni_presets.py. Its preprocessor's `chunk_length` is from memory, and unused.

    python -m bench.families_checkpoint qwen3-omni-30b-a3b DIRECTORY
"""

from __future__ import annotations

import json
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

_AUDIO_ENCODER = {
    "d_model": 1280,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "max_source_positions": 1500,
    "num_mel_bins": 128,
}
_QWEN25_7B = {
    "architectures": ["Qwen2_5OmniModel"],
    "model_type": "qwen2_5_omni",
    "enable_audio_output": False,
    "torch_dtype": "bfloat16",
    "thinker_config": {
        "model_type": "qwen2_5_omni_thinker",
        "torch_dtype": "bfloat16",
        "audio_config": {
            "model_type": "qwen2_5_omni_audio_encoder",
            **_AUDIO_ENCODER,
            "n_window": 100,
            "output_dim": 3584,
        },
        "vision_config": {"model_type": "qwen2_5_omni_vision_encoder", "hidden_size": 1280},
        "text_config": {
            "model_type": "qwen2_5_omni_text",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"},
            "tie_word_embeddings": False,
            "vocab_size": 152064,
        },
        "vision_start_token_id": 151652,
        "audio_token_index": 151646,
        "audio_start_token_id": 151647,
        "audio_end_token_id": 151648,
        "image_token_index": 151655,
        "video_token_index": 151656,
    },
}
_QWEN25_3B = {
    "thinker_config": {
        "audio_config": {"output_dim": 2048},
        "vision_config": {"out_hidden_size": 2048},
        "text_config": {
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "max_window_layers": 36,
            "vocab_size": 151936,
        },
    },
}
_QWEN3_30B = {
    "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
    "model_type": "qwen3_omni_moe",
    "enable_audio_output": False,
    "torch_dtype": "bfloat16",
    "thinker_config": {
        "model_type": "qwen3_omni_moe_thinker",
        "torch_dtype": "bfloat16",
        "audio_config": {
            "model_type": "qwen3_omni_moe_audio_encoder",
            **_AUDIO_ENCODER,
            "n_window": 50,
            "n_window_infer": 800,
            "conv_chunksize": 500,
            "downsample_hidden_size": 480,
            "output_dim": 2048,
        },
        "vision_config": {
            "model_type": "qwen3_omni_moe_vision_encoder",
            "out_hidden_size": 2048,
            "image_size": 768,
            "apply_vit_abs_pos_embed": True,
        },
        "text_config": {
            "model_type": "qwen3_omni_moe_text",
            "hidden_size": 2048,
            "intermediate_size": 768,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": 65536,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "rope_scaling": {
                "interleaved": True,
                "mrope_interleaved": True,
                "mrope_section": [24, 20, 20],
                "rope_type": "default",
                "type": "default",
            },
            "tie_word_embeddings": False,
            "vocab_size": 152064,
        },
        "vision_start_token_id": 151652,
        "audio_token_id": 151675,
        "audio_start_token_id": 151669,
        "audio_end_token_id": 151670,
        "image_token_id": 151655,
        "video_token_id": 151656,
    },
}

_SPECIAL_BASE = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # 151643 and on, in all of Qwen2 and since
_SPECIAL_25 = {
    151646: "<|AUDIO|>",
    151647: "<|audio_bos|>",
    151648: "<|audio_eos|>",
    151652: "<|vision_bos|>",
    151653: "<|vision_eos|>",
    151655: "<|IMAGE|>",
    151656: "<|VIDEO|>",
}
_SPECIAL_3 = {
    151652: "<|vision_start|>",
    151653: "<|vision_end|>",
    151655: "<|image_pad|>",
    151656: "<|video_pad|>",
    151669: "<|audio_start|>",
    151670: "<|audio_end|>",
    151675: "<|audio_pad|>",
}
_NAMED_25 = ("audio_bos", "AUDIO", "audio_eos", "vision_bos", "vision_eos", "IMAGE", "VIDEO")
_NAMED_3 = (
    "audio_start",
    "audio_pad",
    "audio_end",
    "vision_start",
    "vision_end",
    "image_pad",
    "video_pad",
)
_ROLES = ("audio_bos", "audio", "audio_eos", "vision_bos", "vision_eos", "image", "video")

# As published, without what needs tools or images; Qwen3's has no system message of its own.
_CONTENT = (
    "{{{{ '<|im_start|>' + message['role'] + '\\n' }}}}"
    "{{% if message['content'] is string %}}{{{{ message['content'] }}}}"
    "{{% else %}}{{% for item in message['content'] %}}"
    "{{% if item['type'] == 'audio' %}}{{{{ '{audio}' }}}}{{% else %}}{{{{ item['text'] }}}}{{% endif %}}"
    "{{% endfor %}}{{% endif %}}{{{{ '<|im_end|>\\n' }}}}"
)
_ANSWER = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
_DEFAULT_SYSTEM = (
    "{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}"
)

FAMILIES: dict[str, dict[str, Any]] = {}
"""Name -> config.json, at the published size."""


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A copy of nested dictionaries in which those of `changes` win."""
    result = deepcopy(base)
    for key, value in changes.items():
        result[key] = merged(result[key], value) if isinstance(value, dict) and key in result else value
    return result


FAMILIES |= {
    "qwen2.5-omni-7b": _QWEN25_7B,
    "qwen2.5-omni-3b": merged(_QWEN25_7B, _QWEN25_3B),
    "qwen3-omni-30b-a3b": _QWEN3_30B,
}


def write(name: str, directory: Path, changes: dict[str, Any] | None = None, tokenizer: Any = None) -> Path:
    """Write the files of family `name` into `directory`; returns it.

    `changes` go into config.json. `tokenizer` is a `tokenizers.Tokenizer` of Qwen's vocabulary; left out, one
    of single bytes with the special tokens at their published ids.
    """
    config = merged(FAMILIES[name], changes or {})
    is_third = name.startswith("qwen3")
    directory.mkdir(parents=True, exist_ok=True)
    _json(directory / "config.json", config)
    _write_preprocessor(directory, is_third)
    _write_tokenizer(directory, tokenizer or byte_tokenizer(), is_third)
    return directory


def byte_tokenizer() -> Any:
    """Every byte a token; ids above are left free."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _write_preprocessor(directory: Path, is_third: bool) -> None:
    image = {
        "image_mean": [0.5] * 3 if is_third else [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.5] * 3 if is_third else [0.26862954, 0.26130258, 0.27577711],
        "merge_size": 2,
        "patch_size": 16 if is_third else 14,
        "temporal_patch_size": 2,
        "min_pixels": 3136,
        "max_pixels": 12845056,
    }
    audio = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 128,
        "hop_length": 160,
        "n_fft": 400,
        "sampling_rate": 16000,
        "chunk_length": 30 if is_third else 300,
        "padding_value": 0.0,
        "return_attention_mask": True,
        "dither": 0.0,
    }
    kind = "Qwen3OmniMoeProcessor" if is_third else "Qwen2_5OmniProcessor"
    _json(
        directory / "preprocessor_config.json",
        image | audio | {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": kind},
    )


def _write_tokenizer(directory: Path, tokenizer: Any, is_third: bool) -> None:
    special = dict(enumerate(_SPECIAL_BASE, start=151643)) | (_SPECIAL_3 if is_third else _SPECIAL_25)
    data = json.loads(tokenizer.to_str())
    kept = [token for token in data["added_tokens"] if token["id"] not in special]
    number = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    # Ids between the known ones are taken too: transformers counts a tokenizer's added tokens one by one.
    used = {token["id"] for token in kept} | set(special)
    fill = {i: f"<|unused_{i}|>" for i in range(151643, max(special) + 1) if i not in used}
    kept += [{"id": i, "content": text, **number, "special": True} for i, text in (special | fill).items()]
    data["added_tokens"] = sorted(kept, key=lambda token: token["id"])
    if len(data["model"]["vocab"]) < 151643:  # single bytes: the special tokens' ids stay the published ones
        data["model"]["vocab"] |= {f"unused_{i}": i for i in range(len(data["model"]["vocab"]), 151643)}
    (directory / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False))
    names = dict(zip(_ROLES, _NAMED_3 if is_third else _NAMED_25, strict=True))
    tokens = {f"{role}_token": f"<|{name}|>" for role, name in names.items()}
    audio = tokens["audio_bos_token"] + tokens["audio_token"] + tokens["audio_eos_token"]
    each = ("" if is_third else _DEFAULT_SYSTEM) + _CONTENT.format(audio=audio)
    template = f"{{% for message in messages %}}{each}{{% endfor %}}{_ANSWER}"
    _json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": 32768,
            "extra_special_tokens": tokens,
            "chat_template": template,
        },
    )
    _json(directory / "chat_template.json", {"chat_template": template})


def _json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data, indent=1))


if __name__ == "__main__":
    print(write(sys.argv[1], Path(sys.argv[2])))
