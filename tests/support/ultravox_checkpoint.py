"""Writes a tiny random-weight Ultravox checkpoint: vLLM's audio-embedding model with 2 + 2 layers.

Made on demand, needs no network: a Whisper encoder (2 layers, 64 wide, 4 s of context), the projector, a
2-layer Llama decoder, a word-level tokenizer of `VOCAB_SIZE` made-up words, and the few lines of Python that
stand for the Hugging Face processor of the published checkpoints.

    python -m tests.support.ultravox_checkpoint DIRECTORY
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

VOCAB_SIZE = 256
AUDIO_TOKEN_ID = 255  # "<|audio|>"
MAX_POSITIONS = 1024
STACK_FACTOR = 8
MAX_AUDIO_S = 4  # of one item; Whisper has 30
NUM_MEL_BINS = 80

_TEXT = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "initializer_range": 0.5,  # wide, so that greedy answers vary and ties do not happen
}
_AUDIO = {
    "model_type": "whisper",
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "num_mel_bins": NUM_MEL_BINS,
    "max_source_positions": MAX_AUDIO_S * 50,
    "decoder_layers": 1,
    "decoder_attention_heads": 2,
    "init_std": 0.3,
}
_CONFIG = {
    "model_type": "ultravox",
    "architectures": ["UltravoxModel"],
    "audio_token_index": AUDIO_TOKEN_ID,
    "hidden_size": 64,
    "stack_factor": STACK_FACTOR,
    "projector_act": "swiglu",
    "projector_ln_mid": True,
    "torch_dtype": "float32",
    "text_config": _TEXT,
    "audio_config": _AUDIO,
    "vocab_size": VOCAB_SIZE,
    "initializer_range": 0.5,
}

_PROCESSOR = '''"""Stands for the processor of the published Ultravox checkpoints, as far as vLLM asks."""
import torch
from transformers import BatchFeature, ProcessorMixin


class UltravoxProcessor(ProcessorMixin):
    attributes = ["audio_processor", "tokenizer"]
    audio_processor_class = "WhisperFeatureExtractor"
    tokenizer_class = "PreTrainedTokenizerFast"

    def __init__(self, audio_processor=None, tokenizer=None, **kwargs):
        self.audio_processor = audio_processor
        self.tokenizer = tokenizer
        self.chat_template = None
        self.audio_token_replacement = "<|audio|>"

    @classmethod
    def from_pretrained(cls, path, *args, tokenizer=None, **kwargs):
        from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor
        tokenizer = tokenizer or PreTrainedTokenizerFast.from_pretrained(path)
        return cls(WhisperFeatureExtractor.from_pretrained(path), tokenizer)

    def __call__(self, text=None, audios=None, sampling_rate=16000, **kwargs):
        data = {}
        if audios is not None and len(audios):
            longest = max(len(a) for a in audios)
            mel = self.audio_processor(list(audios), sampling_rate=sampling_rate, return_tensors="pt",
                                       padding="max_length", max_length=longest, truncation=False)
            frames = torch.tensor([len(a) // self.audio_processor.hop_length for a in audios])
            data = {"audio_values": mel["input_features"], "audio_lens": frames,
                    "audio_token_len": -(-frames // 16), "audio_num_chunks": torch.ones_like(frames)}
        if text is not None:
            ids = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")
            data["input_ids"] = ids["input_ids"]
        return BatchFeature(data)
'''


def build(directory: Path) -> Path:
    """Write the checkpoint into `directory`, unless a complete one is there. Returns it."""
    if (directory / "complete").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", _CONFIG)
    (directory / "ultravox_processing.py").write_text(_PROCESSOR)
    _write_json(
        directory / "processor_config.json",
        {
            "processor_class": "UltravoxProcessor",
            "auto_map": {"AutoProcessor": "ultravox_processing.UltravoxProcessor"},
        },
    )
    _write_feature_extractor(directory)
    _write_tokenizer(directory)
    _write_weights(directory)
    (directory / "complete").touch()
    return directory


def _write_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data, indent=1))


def _write_feature_extractor(directory: Path) -> None:
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=NUM_MEL_BINS, chunk_length=MAX_AUDIO_S)
    extractor.save_pretrained(directory)


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(3, AUDIO_TOKEN_ID)), "<|audio|>"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|audio|>"],
    ).save_pretrained(directory)


def _write_weights(directory: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM, WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    torch.manual_seed(0)
    text = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in _TEXT.items() if k != "model_type"}))
    audio = WhisperEncoder(WhisperConfig(**{k: v for k, v in _AUDIO.items() if k != "model_type"}))
    stacked, hidden = _AUDIO["d_model"] * STACK_FACTOR, _CONFIG["hidden_size"]
    weights = {
        "multi_modal_projector.ln_pre.weight": torch.ones(stacked),
        "multi_modal_projector.linear_1.weight": torch.randn(hidden, stacked) * 0.2,
        "multi_modal_projector.ln_mid.weight": torch.ones(hidden // 2),
        "multi_modal_projector.linear_2.weight": torch.randn(_TEXT["hidden_size"], hidden // 2) * 0.2,
    }
    weights |= {f"language_model.{name}": tensor for name, tensor in text.state_dict().items()}
    weights |= {f"audio_tower.{name}": tensor for name, tensor in audio.state_dict().items()}
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()}, directory / "model.safetensors"
    )


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
