"""Qwen's tokenizer from a checkpoint: tokenizer.json, or what Qwen publishes in its stead."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""Of Qwen2 and all since: numbers digit by digit (transformers, `Qwen2Tokenizer`)."""


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """Raises ValueError where the checkpoint has none."""
    whole = model_dir / "tokenizer.json"
    if whole.is_file():
        return Tokenizer.from_file(str(whole))
    parts = [model_dir / name for name in ("vocab.json", "merges.txt", "tokenizer_config.json")]
    for path in parts:
        if not path.is_file():
            raise ValueError(f"{model_dir} holds no tokenizer: neither tokenizer.json nor {path.name}")
    vocab, merges, config = parts
    tokenizer = Tokenizer(models.BPE.from_file(str(vocab), str(merges)))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = json.loads(config.read_text()).get("added_tokens_decoder", {})
    for token_id, token in sorted(added.items(), key=lambda item: int(item[0])):
        is_special = bool(token.get("special"))
        tokenizer.add_tokens([AddedToken(token["content"], normalized=False, special=is_special)])
        if tokenizer.token_to_id(token["content"]) != int(token_id):
            raise ValueError(f"{config}: {token['content']} cannot have the id {token_id}")
    return tokenizer
