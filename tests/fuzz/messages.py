"""What a broken, old or hostile client might send: seeded, so that a failure can be seen again."""

from __future__ import annotations

import json
import random
from typing import Any

from engine.types import TurnMode

Message = str | bytes

VALID: tuple[dict[str, Any], ...] = (
    {"type": "session.update", "instructions": "be brief", "max_tokens": 20, "turn": "manual"},
    {"type": "session.update", "turn": "server_vad"},
    {"type": "session.update", "turn": "continuous"},
    {"type": "session.update", "max_tokens": 1},
    {"type": "session.update", "instructions": "x" * 300},
    {"type": "session.update"},
    {"type": "input.commit"},
    {"type": "session.update", "voice": True},
    {"type": "session.update", "voice": False},
    {"type": "response.cancel"},
    {"type": "response.played", "response_id": "r", "played_ms": 250},
    {"type": "ping"},
    {"type": "auth", "key": "k"},
)
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 4096, 4097, 2**31, 2**63, 10**400, 1e308, float("nan"), float("-inf"), "",
    " ", "null", "manual", "\x00", "\ud800", "é" * 50, "😀" * 3, "{}", [], [[]], {}, {"type": "ping"},
    [None] * 20,
)  # fmt: skip
NOT_JSON: tuple[str, ...] = (
    "", " ", "{", "}", "[" * 5000, '{"a":' * 3000, "'ping'", '{"type":}', "ping", "\x00", "\ufeff{}",
    "]" * 99, '{"type": "ping"', '{"type": "ping"}}', "undefined", "1e", "\\u0000", "<xml/>",
    "GET / HTTP/1.1\r\n\r\n",
)  # fmt: skip


class Messages:
    """An endless supply. `next(gentle=True)` never gives what the protocol answers with a close."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._pcm = self._rng.randbytes(200_000)

    def next(self, gentle: bool = False) -> Message:
        kinds = [self._audio, self._valid, self._mutated, self._broken]
        weights = [50, 40, 0, 0] if gentle else [45, 30, 20, 1]
        return self._rng.choices(kinds, weights)[0]()

    def query(self) -> str:
        """Mostly one that is accepted."""
        rng = self._rng
        parts = []
        if rng.random() < 0.8:
            parts.append(f"turn={rng.choice(list(TurnMode))}")
        if rng.random() < 0.3:
            parts.append(f"sample_rate={rng.choice([8000, 11025, 16000, 24000, 44100, 48000])}")
        if rng.random() < 0.3:
            parts.append(f"max_tokens={rng.choice([1, 2, 17, 1024])}")
        if rng.random() < 0.5:
            parts.append("voice=on")
        if rng.random() < 0.08:
            odd = rng.choice(
                [
                    "voice=yes",
                    "sample_rate=9e9",
                    "turn=%00",
                    "max_tokens=-0",
                    "turn=",
                    "sample_rate=%F0%9F%98%80",
                ]
            )
            parts.append(odd)
        if rng.random() < 0.1:
            parts.append(rng.choice(["x=y", "=", "%", "turn", "&&&", "a=" + "b" * 500]))
        return "&".join(parts)

    def _audio(self) -> bytes:
        """Noise, silence or a constant, of any length: 20 ms, an odd byte, nothing, a second at once."""
        size = self._rng.choice([640, 640, 640, 0, 1, 3, 641, 1920, self._rng.randrange(5000), 32_000])
        kind = self._rng.random()
        if kind < 0.3:
            return bytes(size)
        if kind < 0.4:
            return b"\x00\x80" * (size // 2)
        start = self._rng.randrange(len(self._pcm) - size)
        return self._pcm[start : start + size]

    def _valid(self) -> str:
        return json.dumps(self._rng.choice(VALID))

    def _mutated(self) -> str:
        """Still JSON, but a value, a name or the whole is not what it should be."""
        rng = self._rng
        message = dict(rng.choice(VALID))
        match rng.randrange(5):
            case 0:
                message[rng.choice(list(message))] = rng.choice(ODD_VALUES)
            case 1:
                message[rng.choice(["extra", "", "TYPE", "\x00", "__proto__"])] = rng.choice(ODD_VALUES)
            case 2:
                message.pop("type")
            case 3:
                message["type"] = message["type"] + rng.choice(["s", " ", "\x00", ".", "é"])
            case _:
                return json.dumps(rng.choice(ODD_VALUES))
        return json.dumps(message, ensure_ascii=rng.random() < 0.5).encode("utf-8", "replace").decode()

    def _broken(self) -> str:
        """Random characters, or a good message with bytes changed, cut or doubled."""
        rng = self._rng
        kind = rng.randrange(3)
        if kind == 0:
            return rng.choice(NOT_JSON)
        if kind == 1:
            return "".join(chr(rng.randrange(0xD800)) for _ in range(rng.randrange(60)))
        text = self._valid()
        at, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        return text[:at] + rng.choice(["", text[at:end] * 2, chr(rng.randrange(1, 0x250))]) + text[end:]
