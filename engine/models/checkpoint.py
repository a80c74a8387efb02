"""GGUF of a llama-architecture model -> a checkpoint directory that vLLM and `tokenizers` load.

What differs between the two formats:

- weights are block-quantised: dequantised here to float32, then rounded to bfloat16;
- llama.cpp stores the rows of each q and k head as rotation pairs (x0, x_half, x1, ...), Hugging Face as two
  halves (x0, x1, ..., x_half, ...): llama.cpp `convert_hf_to_gguf.py`, `LlamaModel.permute`; undone here;
- the tokenizer is a list of tokens and merges: rebuilt as byte-level BPE with the pre-tokenizer that
  `tokenizer.ggml.pre` names ("smollm": every digit alone, then GPT-2's pattern).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL

_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(gguf_file: Path, out_dir: Path, on_tensor: Callable[[int, int], None] | None = None) -> None:
    """Write config, weights and tokenizer of `gguf_file` into `out_dir`, which must exist.

    `on_tensor(done, total)` follows the work. Raises ValueError for a file that is not understood.
    """
    from gguf import GGUFReader  # only needed once, at preparation

    reader = GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama" or fields["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(f"{gguf_file.name}: only llama weights with the smollm tokenizer are understood")
    _write_weights(reader, fields, out_dir / "model.safetensors", on_tensor)
    _write_json(out_dir / "config.json", model_config(fields))
    _write_json(out_dir / "generation_config.json", _token_ids(fields))
    _write_json(out_dir / "tokenizer_config.json", _tokenizer_config(fields))
    _write_tokenizer(fields, out_dir / "tokenizer.json")


def model_config(fields: dict[str, Any]) -> dict[str, Any]:
    """The Hugging Face configuration with the GGUF's own values; embeddings are tied in SmolLM2."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        "rms_norm_eps": 1e-5,  # the GGUF holds its float32 rounding
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **_token_ids(fields),
    }


def unpermute(weight: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Rows of q or k from rotation pairs to halves; `weight` is [num_heads * head_dim, hidden]."""
    rows, hidden = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden)
    return pairs.swapaxes(1, 2).reshape(rows, hidden)


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of the nearest bfloat16 (ties to even) of finite float32 values."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _write_weights(
    reader: Any, fields: dict[str, Any], path: Path, on_tensor: Callable[[int, int], None] | None
) -> None:
    from gguf import dequantize

    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    arrays: dict[str, npt.NDArray[np.uint16]] = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        values = values.reshape([int(n) for n in tensor.shape][::-1])  # GGUF names the fastest axis first
        match tensor.name.removesuffix(".weight").split("."):
            case ["token_embd"]:
                name = "model.embed_tokens.weight"
            case ["output_norm"]:
                name = "model.norm.weight"
            case ["blk", layer, part] if part in _TENSOR_NAMES:
                name = f"model.layers.{layer}.{_TENSOR_NAMES[part]}.weight"
                if part in heads:
                    values = unpermute(values, heads[part])
            case _:
                raise ValueError(f"tensor {tensor.name} is not one of a llama model with tied embeddings")
        arrays[name] = to_bfloat16(values)
        if on_tensor:
            on_tensor(done, len(reader.tensors))
    _write_safetensors(arrays, path)


def _write_safetensors(arrays: dict[str, npt.NDArray[np.uint16]], path: Path) -> None:
    """bfloat16 bits in the safetensors layout: header length (u64), JSON header, data in header order.

    By hand because numpy has no bfloat16 and importing torch here would fix its thread count too early.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": "BF16",
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(array.data)


def _write_tokenizer(fields: dict[str, Any], path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types: list[int] = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    if tokenizer.get_vocab_size() != len(tokens):
        raise ValueError(f"{tokenizer.get_vocab_size()} tokens rebuilt of {len(tokens)}")
    tokenizer.save(str(path))


def _token_ids(fields: dict[str, Any]) -> dict[str, int]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{short}_token_id": fields[f"tokenizer.ggml.{name}_token_id"] for short, name in names.items()}


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    special = {key.removesuffix("_id"): tokens[token_id] for key, token_id in _token_ids(fields).items()}
    return {
        # Not GPT2Tokenizer: transformers 5 rebuilds that one from vocab and merges and loses the digit split.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": fields["tokenizer.chat_template"],
        "model_max_length": fields["llama.context_length"],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "clean_up_tokenization_spaces": False,
        **special,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
