"""The converted checkpoint: read back, and run by an independent forward pass in numpy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from engine.models.checkpoint import model_config, to_bfloat16, unpermute

CONTROL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>",
    "<gh_stars>", "<issue_start>", "<issue_comment>", "<issue_closed>", "<jupyter_start>", "<jupyter_text>",
    "<jupyter_code>", "<jupyter_output>", "<jupyter_script>", "<empty_output>",
]  # fmt: skip

Weights = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def weights(llm_dir: Path) -> Weights:
    """The safetensors file by its documented layout, in float32."""
    data = (llm_dir / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    loaded, end = {}, 0
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        assert (entry["dtype"], start) == ("BF16", end)
        bits = np.frombuffer(data[8 + length + start : 8 + length + stop], np.uint16).astype(np.uint32) << 16
        loaded[name] = bits.view(np.float32).reshape(entry["shape"])
        end = stop
    assert 8 + length + end == len(data)
    return loaded


def forward(weights: Weights, config: dict, ids: list[int]) -> np.ndarray:
    """Logits behind the last token. Source: the Llama definition in transformers, modeling_llama.py."""
    heads, kv_heads, dim = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return (
            x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * weights[f"{name}.weight"]
        )

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ weights[f"{name}.weight"].T

    angles = np.outer(np.arange(len(ids)), config["rope_theta"] ** (-np.arange(0, dim, 2) / dim))
    cos, sin = (np.tile(f(angles), 2).astype(np.float32)[:, None] for f in (np.cos, np.sin))

    def rotate(x: np.ndarray) -> np.ndarray:
        halves = np.concatenate([-x[..., dim // 2 :], x[..., : dim // 2]], axis=-1)
        return x * cos + halves * sin

    hidden = weights["model.embed_tokens.weight"][ids]
    future = np.triu(np.full((len(ids), len(ids)), -np.inf, np.float32), 1)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        x = norm(hidden, f"{layer}.input_layernorm")
        q = rotate(linear(x, f"{layer}.self_attn.q_proj").reshape(-1, heads, dim))
        k = rotate(linear(x, f"{layer}.self_attn.k_proj").reshape(-1, kv_heads, dim))
        v = linear(x, f"{layer}.self_attn.v_proj").reshape(-1, kv_heads, dim)
        k, v = (np.repeat(t, heads // kv_heads, axis=1) for t in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / dim**0.5 + future
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", scores, v).reshape(len(ids), -1)
        hidden = hidden + linear(mixed, f"{layer}.self_attn.o_proj")
        x = norm(hidden, f"{layer}.post_attention_layernorm")
        gate, up = linear(x, f"{layer}.mlp.gate_proj"), linear(x, f"{layer}.mlp.up_proj")
        hidden = hidden + linear(gate / (1 + np.exp(-gate)) * up, f"{layer}.mlp.down_proj")
    return norm(hidden, "model.norm")[-1] @ weights["model.embed_tokens.weight"].T


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        (
            "<|im_start|>user\nName the capital of France.<|im_end|>\n<|im_start|>assistant\nThe capital is",
            " Paris",
        ),
        ("Monday, Tuesday, Wednesday, Thursday,", " Friday"),
    ],
)
def test_weights_and_tokenizer_speak(llm_dir: Path, weights: Weights, prompt: str, answer: str) -> None:
    """A wrong permutation, rope base, tie or token order turns this to noise."""
    config = json.loads((llm_dir / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(llm_dir / "tokenizer.json"))
    ids = tokenizer.encode(prompt).ids
    logits = forward(weights, config, ids)
    assert tokenizer.decode([int(logits.argmax())]) == answer


def test_config(llm_dir: Path, weights: Weights) -> None:
    config = json.loads((llm_dir / "config.json").read_text())
    assert config["max_position_embeddings"] == 8_192
    assert config["rope_theta"] == 100_000
    assert config["tie_word_embeddings"] is True
    assert weights["model.embed_tokens.weight"].shape == (config["vocab_size"], config["hidden_size"])
    assert len(weights) == 2 + 9 * config["num_hidden_layers"]
    assert all(np.isfinite(w).all() for w in weights.values())
    generation = json.loads((llm_dir / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_special_tokens_are_single(llm_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(llm_dir / "tokenizer.json"))
    assert [tokenizer.encode(token).ids for token in CONTROL] == [[i] for i in range(17)]
    assert tokenizer.get_vocab_size() == 49_152


def test_every_digit_is_its_own_token(llm_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(llm_dir / "tokenizer.json"))
    assert tokenizer.encode("in 1984").tokens == ["in", "Ġ", "1", "9", "8", "4"]


def test_unpermute_undoes_llama_cpp() -> None:
    """llama.cpp, convert_hf_to_gguf.py, LlamaModel.permute."""
    heads, rows, hidden = 3, 24, 5
    original = np.random.default_rng(0).standard_normal((rows, hidden)).astype(np.float32)
    stored = original.reshape(heads, 2, rows // heads // 2, hidden).swapaxes(1, 2).reshape(rows, hidden)
    assert not np.array_equal(stored, original)
    np.testing.assert_array_equal(unpermute(stored, heads), original)


def test_to_bfloat16_rounds_to_nearest_even() -> None:
    values = np.array([1.0, -2.5, 0.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, 3.0e38], np.float32)
    back = (to_bfloat16(values).astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(back[:6], [1.0, -2.5, 0.0, 1.0, 1 + 2**-6, 1 + 2**-7])
    assert abs(back[6] / 3.0e38 - 1) < 2**-8


def test_config_names_what_it_lacks() -> None:
    with pytest.raises(KeyError, match=r"llama\.vocab_size"):
        model_config({})
