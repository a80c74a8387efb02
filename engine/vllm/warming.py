"""A fresh engine before its first session: it meets the batches to come, and the family's word is proved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.engine import EngineError
from engine.models.family import ItemLayout
from engine.types import Finish, Sampling, Work

if TYPE_CHECKING:
    from engine.vllm.core import SessionCore

_NUM_TOKENS = 2  # taken in by each session
_MAX_STEPS = 64  # several times what one wave can take


def warm_up(core: SessionCore, samplings: Iterable[Sampling]) -> None:
    """Decode by each way of sampling in batches of all sessions, then of each power of two, down to one.

    On a GPU vLLM compiles its top-p kernels when a batch of a new class of sizes first occurs (on an H200 to
    4, 8, 16, 33, 66), for 2 to 3 s in which all sessions wait; its own warm-up leaves them out
    (bench/results/families.md). Raises EngineError where a session does not get its tokens.
    """
    distinct = dict.fromkeys(replace(sampling, stop_token_ids=()) for sampling in samplings)
    for generation, sampling in enumerate(distinct):
        _wave(core, generation, sampling)


def _wave(core: SessionCore, generation: int, sampling: Sampling) -> None:
    """All begin in one step; after each step as many are done as bring the batch to its next size."""
    limits = core.limits
    num_sessions = min(
        limits.max_sessions,
        limits.num_kv_blocks // limits.blocks_per_session,
        limits.max_batch_tokens // _NUM_TOKENS,
    )
    sizes = sorted({num_sessions, *(1 << i for i in range(num_sessions.bit_length()))}, reverse=True)
    room = (limits.max_session_tokens or 1 << 20) - _NUM_TOKENS
    names = [f"warm-up-{i}" for i in range(num_sessions)]
    for i, name in enumerate(names):
        tokens, max_tokens = (0,) * _NUM_TOKENS, min(sum(i < size for size in sizes), room)
        core.submit(Work(name, generation, 0, tokens, max_tokens=max_tokens, sampling=sampling))
    for _ in range(_MAX_STEPS):
        if core.has_work():
            core.step()
    ends = [result for result in core.take_results() if result.finish is not None]
    if [result.finish for result in ends] != [Finish.LENGTH] * num_sessions:
        told = next((r.error or r.finish for r in ends if r.finish is not Finish.LENGTH), "nothing")
        raise EngineError(f"the warm-up of {num_sessions} sessions with {sampling} ended with: {told}")
    _end(core, generation, names)


def prove(core: SessionCore, layout: ItemLayout) -> None:
    """Encode items as the family says they are: else its first caller would find out that they are not."""
    from engine.vllm.layout import LayoutCheck  # here: it imports torch

    check = LayoutCheck(layout)
    for num_frames in check.lengths:
        item, name = check.example(num_frames), f"layout-{num_frames}"
        try:
            core.submit(Work(name, 0, 0, (0,) * item.num_tokens, (item,)))
            while core.has_work():
                core.step()
            (result,) = core.take_results()
        except Exception as error:
            what = f"the encoder does not make {item.num_tokens} tokens of {num_frames} frames"
            raise EngineError(f"{what}: {type(error).__name__}: {error}") from None
        if result.finish is not Finish.FED:
            raise EngineError(f"an item of {num_frames} frames is refused: {result.error}")
        _end(core, 0, [name])


def _end(core: SessionCore, generation: int, names: Iterable[str]) -> None:
    for name in names:
        core.end(name, generation)
    while core.has_work():
        core.step()
