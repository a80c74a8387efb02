"""Arithmetic of a session's blocks. All sizes in tokens unless they say blocks.

A session's query at position t sees the first S tokens and the last W, [0, S) and [t - W + 1, t]. Between
them lies the gap: what no query to come will see. Blocks wholly inside it are freed.
"""

from __future__ import annotations


def gap_blocks(num_sink_tokens: int, num_processed: int, window: int, block_size: int) -> tuple[int, int]:
    """Blocks [first, last) wholly inside the gap once `num_processed` tokens are done; first >= last: none.

    The next query is at position `num_processed` and sees back to num_processed - window + 1.
    """
    return -(-num_sink_tokens // block_size), max(0, num_processed - window + 1) // block_size


def max_blocks(
    max_sink_tokens: int, window: int, in_flight: int, max_session_tokens: int, block_size: int
) -> int:
    """The most blocks one session can hold at any time.

    Its sinks, and a window of the oldest query in flight (window - 1 tokens before it) with all tokens that
    are in flight, `in_flight` at most. The latter begin anywhere in a block, so they can touch one more.
    """
    sinks = -(-max_sink_tokens // block_size)
    resident = -(-(window - 1 + in_flight - 1) // block_size) + 1
    return min(sinks + resident, -(-max_session_tokens // block_size))
