"""MiniCPM-o checkpoint directories without weights: config.json and tokenizer, published sizes or others.

The published config.json files cannot be had here. Where the values come from:
- the backbones: 4.5 is Qwen3-8B (36 layers, 4,096 wide, 12,288 inside, 32 heads, 8 for keys and values, RoPE
  base 1e6, 40,960 positions), 2.6 is Qwen2.5-7B (28 layers, 3,584, 18,944, 28 heads, 4, 1e6, 32,768): the
  model cards (OpenBMB/MiniCPM-V, README and docs/minicpm_o2dot6_en.md) name them, and public ports have these
  sizes of the config.json, all but the 12,288;
- the encoder, both: Whisper medium's (24 layers, 1,024 wide, 16 heads, 4,096 inside, 80 mel bins), as public
  ports read it from either config.json;
- `audio_pool_step` 5 and 2, `audio_chunk_length` 1.0: the defaults of the checkpoints'
  configuration_minicpmo.py (4.5's in OpenBMB/MiniCPM-o-Demo, MiniCPMO45/);
- 4.5's added tokens: ids 151669 to 151747, as in its tokenizer.json, so a vocabulary of 151,748; public C++
  ports have the same ids for those of speech (151704 to 151721). Of 2.6 the names and the size, 151,700, are
  known; which id each has is not, and does not matter: they are looked up by name.

    python -m bench.minicpmo_checkpoint 4.5 DIRECTORY
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

UNKNOWN_ID = 128_244  # "<unk>", an ordinary entry of Qwen's vocabulary: the audio's placeholder
_VOCAB_SIZE = 151_643  # Qwen's, before the special tokens

_ENCODER = {
    "model_type": "whisper",
    "d_model": 1024,
    "encoder_layers": 24,
    "encoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "num_mel_bins": 80,
    "max_source_positions": 1500,
}
_COMMON = {
    "architectures": ["MiniCPMO"],
    "auto_map": {  # the checkpoint's own code, which is not there and must not be missed
        "AutoConfig": "configuration_minicpmo.MiniCPMOConfig",
        "AutoModel": "modeling_minicpmo.MiniCPMO",
    },
    "model_type": "minicpmo",
    "torch_dtype": "bfloat16",
    "audio_config": _ENCODER,
    "audio_chunk_length": 1.0,
    # what is not served, as published: it must not be in the way
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "image_size": 980,
        "intermediate_size": 4304,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
    },
    "slice_config": {"model_type": "minicpmv", "patch_size": 14, "max_slice_nums": 9},
    "tts_config": {"model_type": "minicpmtts", "hidden_size": 768, "num_hidden_layers": 20},
    "query_num": 64,
    "drop_vision_last_layer": False,
    "init_vision": True,
    "init_audio": True,
    "init_tts": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "rope_scaling": None,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "bos_token_id": 151_644,
    "eos_token_id": 151_645,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "2.6": _COMMON
    | {
        "version": "2.6",
        "audio_pool_step": 2,
        "vocab_size": 151_700,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
    },
    "4.5": _COMMON
    | {
        "version": "4.5",
        "audio_pool_step": 5,
        "vocab_size": 151_748,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
    },
}
"""Version -> config.json, at the published size."""

_QWEN25 = (  # 151643 and on
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> "
    "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> "
    "<|file_sep|>"
).split()
_QWEN3 = [*_QWEN25, "<tool_response>", "</tool_response>", "<think>", "</think>"]
_ORDINARY = {
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
}
"""Added, but not special: text to the tokenizer."""
_SPEECH = "spk_bos spk spk_eos tts_bos tts_eos listen speak interrupt vad_start vad_end"
_NAMES = {
    "2.6": (
        "image ref box quad point slice image_id unit asr query",
        f"audio_start audio_end {_SPEECH}",
    ),
    "4.5": (
        "image ref box quad point slice image_id unit answer focus line perception source_image "
        "image_save_to",
        f"audio_start audio audio_end {_SPEECH} emotion_start emotion_end speed_start speed_end pitch_start "
        "pitch_end turn_bos turn_eos chunk_eos chunk_bos chunk_tts_bos chunk_tts_eos tts_pad "
        + " ".join(f"timbre_{i}" for i in range(7, 32)),
    ),
}
"""<name> and </name>; <|name|>."""


def write(
    version: str,
    directory: Path,
    changes: dict[str, Any] | None = None,
    tokenizer: dict[str, Any] | None = None,
) -> Path:
    """Write the files into `directory`; returns it.

    `changes` go into config.json. `tokenizer` is the content of Qwen's tokenizer.json (Qwen2.5's for 2.6,
    Qwen3's for 4.5); left out, one of single bytes with the same special tokens.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = CONFIGS[version] | (changes or {})
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    content = tokenizer or _byte_tokenizer()
    content["added_tokens"] = [_added(i, token) for i, token in added_tokens(version).items()]
    (directory / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False))
    # As published, it names a class of the checkpoint's own code.
    names = {"tokenizer_class": "MiniCPMOTokenizerFast", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names, indent=1))
    return directory


def added_tokens(version: str) -> dict[int, str]:
    """Id -> token, of all that the tokenizer takes as a whole."""
    paired, single = (names.split() for names in _NAMES[version])
    tokens = list(_QWEN25 if version == "2.6" else _QWEN3)
    tokens += [tag for name in paired for tag in (f"<{name}>", f"</{name}>")]
    tokens += [f"<|{name}|>" for name in single]
    return {UNKNOWN_ID: "<unk>"} | dict(enumerate(tokens, start=_VOCAB_SIZE))


def _added(token_id: int, token: str) -> dict[str, Any]:
    marks = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": token_id, "content": token, **marks, "special": token not in _ORDINARY}


def _byte_tokenizer() -> dict[str, Any]:
    """Every byte a token; the vocabulary is filled up, so that the special tokens have their ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    content = json.loads(tokenizer.to_str())
    vocab = content["model"]["vocab"]
    filled = {("<unk>" if i == UNKNOWN_ID else f"unused{i}"): i for i in range(len(vocab), _VOCAB_SIZE)}
    content["model"]["vocab"] = vocab | filled
    return content


if __name__ == "__main__":
    print(write(sys.argv[1], Path(sys.argv[2])))
