"""The tiny model's windowed engine for the tests, and works for it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from engine.types import Work
from engine.vllm.settings import VllmSettings

if TYPE_CHECKING:
    from tests.engine.vllm.stepper import Stepper

W, SINKS, CHUNK, BLOCK = 64, 20, 48, 16
NUM_SESSIONS = 6


def blocks_per_session(steps_in_flight: int = 1) -> int:
    window = -(-(W - 1 + steps_in_flight * CHUNK - 1) // BLOCK) + 1
    return -(-SINKS // BLOCK) + window


def settings(**changes: Any) -> VllmSettings:
    """A pool for exactly `NUM_SESSIONS` windowed sessions, in which no whole one would fit."""
    from tests.engine.vllm.stepper import SETTINGS  # here: it imports vLLM

    token_bytes = 2 * 2 * 32 * 4  # 2 layers, key and value, one KV head of 32, float32
    usual = replace(
        SETTINGS,
        max_session_tokens=1000,
        max_batch_tokens=128,
        block_size_tokens=BLOCK,
        window_tokens=W,
        max_sink_tokens=SINKS,
        max_chunk_tokens=CHUNK,
        kv_cache_bytes=(NUM_SESSIONS * blocks_per_session() + 1) * BLOCK * token_bytes,
    )
    return replace(usual, **changes)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple((7 * i + 13 * seed + i * i) % 200 + 10 for i in range(length))


def begin(stepper: Stepper, name: str, length: int = 100, max_tokens: int = 0) -> Work:
    return replace(stepper.work(name, prompt(length), max_tokens), num_head_tokens=SINKS)


def more(stepper: Stepper, name: str, length: int, max_tokens: int = 0, seed: int = 1) -> Work:
    return replace(stepper.work(name, prompt(length, seed), max_tokens), num_head_tokens=SINKS)
