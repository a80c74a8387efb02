"""Text <-> token ids of a byte-level BPE model, for a server that takes text from strangers."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer


class TextCodec:
    """Encodes what people say; only `special` gives special tokens, so nobody can speak or type one."""

    def __init__(self, tokenizer: Path | Tokenizer) -> None:
        """`tokenizer`: a tokenizer.json, or one that is loaded."""
        if isinstance(tokenizer, Path):
            tokenizer = Tokenizer.from_file(str(tokenizer))
        self._tokenizer = tokenizer
        self._tokenizer.encode_special_tokens = True  # "<|im_end|>" in a text is nine ordinary tokens
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)
        to_byte = {char: byte for byte, char in enumerate(_byte_chars())}
        self._bytes = [b""] * (1 + max(self._tokenizer.get_vocab().values()))
        for token, i in self._tokenizer.get_vocab().items():
            if i not in self._special:
                self._bytes[i] = bytes(to_byte[char] for char in token)

    def special(self, token: str) -> int:
        """The id of a special token. Raises ValueError for any other text."""
        token_id = self._tokenizer.token_to_id(token)
        if token_id not in self._special:
            raise ValueError(f"{token!r} is not a special token of this model")
        return token_id

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def bytes_of(self, token_id: int) -> bytes:
        """A token's part of the UTF-8 text; nothing for special tokens and ids out of range."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def detokenizer(self) -> ByteDetokenizer:
        return ByteDetokenizer(self)


class ByteDetokenizer:
    """`Detokenizer` of one answer: holds back at most the three bytes of an unfinished character."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(self._codec.bytes_of(i) for i in token_ids))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


def _byte_chars() -> list[str]:
    """The character for each byte in a byte-level vocabulary (openai/gpt-2, `bytes_to_unicode`)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    chars, shifted = [], 0
    for byte in range(256):
        if byte in printable:
            chars.append(chr(byte))
        else:
            chars.append(chr(256 + shifted))
            shifted += 1
    return chars
