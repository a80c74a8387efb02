"""A parked session's record in vLLM: going back to fewer tokens, and cutting the gap out.

Called between two turns, when no step of the session is in flight: nothing on the device reads what changes
here, and the session's next step brings the worker its tokens and its block table anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.request import Request

from engine.vllm.sink_window.spec import SinkWindowManager


@dataclass(frozen=True, slots=True)
class Move:
    """Keys of one session that come nearer to its sinks."""

    request_id: str
    block_ids: tuple[int, ...]  # in the table's order
    distance_tokens: int  # each key's position falls by so many


def why_not_forget(
    request: Request,
    managers: Sequence[SingleTypeKVCacheManager],
    keep_tokens: int,
    num_evicted: int,
    num_head_tokens: int,
    closes_gap: bool,
) -> str | None:
    """Why the session cannot go back to its first `keep_tokens`; None if it can.

    They count the `num_evicted` that were compacted away before. `closes_gap`: compaction will follow; else a
    query further back would look for its window in blocks that are freed.
    """
    done = request.num_computed_tokens + num_evicted
    if keep_tokens > done:
        return "it has fewer"
    if keep_tokens < min(num_head_tokens, done):
        return "its head stays for ever"
    for manager in managers:
        if keep_tokens < done and not isinstance(manager.kv_cache_spec, AttentionSpec):
            return "this model keeps a state that cannot be taken back"
        kept = keep_tokens - num_evicted
        if kept < _first_needed(manager, request, kept, num_evicted > 0, closes_gap):
            return "what comes before them was freed"
    return None


def forget(request: Request, managers: Sequence[SingleTypeKVCacheManager], keep_tokens: int) -> None:
    """Drop every token of the record from `keep_tokens` on, and the blocks that held nothing else."""
    for manager in managers:
        blocks = manager.req_to_blocks[request.request_id]
        kept = -(-keep_tokens // manager.block_size)
        manager.block_pool.free_blocks(block for block in reversed(blocks[kept:]) if not block.is_null)
        _drop(blocks, manager, request, kept, len(blocks))
    _drop_tokens(request, keep_tokens, request.num_computed_tokens)


def compact(request: Request, manager: SinkWindowManager, slack_tokens: int) -> Move | None:
    """Cut the freed blocks out, once they hold `slack_tokens`. None: they do not."""
    blocks = manager.req_to_blocks[request.request_id]
    first, last = _gap(manager, request)
    distance = (last - first) * manager.block_size
    if distance < max(slack_tokens, 1):
        return None
    _drop(blocks, manager, request, first, last)
    _drop_tokens(request, first * manager.block_size, last * manager.block_size)
    # From a list: tuples made of a generator fill CPython's free lists, which none is then taken from.
    block_ids = tuple([block.block_id for block in blocks[first:]])
    return Move(request.request_id, block_ids, distance)


def _gap(manager: SinkWindowManager, request: Request) -> tuple[int, int]:
    """Freed blocks [first, last) of the table."""
    blocks = manager.req_to_blocks[request.request_id]
    first = -(-manager.heads.get(request.request_id, 0) // manager.block_size)
    last = first
    while last < len(blocks) and blocks[last].is_null:
        last += 1
    return first, last


def _first_needed(
    manager: SingleTypeKVCacheManager, request: Request, kept: int, was_compacted: bool, closes_gap: bool
) -> int:
    """The shortest record this manager's layers can go back to, when the next query is at `kept`."""
    blocks, size = manager.req_to_blocks[request.request_id], manager.block_size
    if isinstance(manager, SinkWindowManager):
        first, last = _gap(manager, request)
        if first == last and not was_compacted:
            return 0
        return last * size + (0 if closes_gap else manager.window_tokens - 1)
    seen = blocks[manager.get_num_skipped_tokens(kept) // size : -(-kept // size)]
    return kept + 1 if any(block.is_null for block in seen) else 0


def _drop(
    blocks: list[KVCacheBlock], manager: SingleTypeKVCacheManager, request: Request, first: int, last: int
) -> None:
    del blocks[first:last]
    if request.request_id in manager.num_cached_block:
        manager.num_cached_block[request.request_id] = 0  # nothing is: prefix caching is off


def _drop_tokens(request: Request, start: int, end: int) -> None:
    """Tokens [start, end) leave the record, and all that are not computed; the rest is its prompt now."""
    tokens = request._all_token_ids  # in place: vLLM holds a view of this very list
    del tokens[request.num_computed_tokens :]
    del tokens[start:end]
    request.num_computed_tokens = len(tokens)
    request.prompt_token_ids = list(tokens)  # the worker holds on to the old one
    request.num_prompt_tokens = len(tokens)
    request._output_token_ids.clear()
