"""Audio that waits: in turns, bounded, nothing lost but what is counted."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.audio.queue import MAX_TURNS, AudioQueue


def samples(start: int, count: int) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.float32)


def test_turns_come_out_one_by_one_with_their_ends():
    queue = AudioQueue()
    queue.append(samples(0, 3), 100)
    queue.end_turn(7.0)
    queue.append(samples(3, 2), 100)
    assert queue.has_ended_turn and queue.num_samples == 5
    first, second = queue.take(), queue.take()
    assert (first.audio.tolist(), first.ended_at) == ([0, 1, 2], 7.0)
    assert (second.audio.tolist(), second.ended_at) == ([3, 4], None)
    assert not queue.has_audio and queue.num_samples == 0


@given(st.lists(st.one_of(st.integers(1, 50), st.just("end"), st.just("take")), max_size=60))
def test_beyond_the_limit_the_oldest_goes_and_is_counted(moves: list):
    queue, limit = AudioQueue(), 64
    total = num_ends = taken = taken_ends = 0
    for move in moves:
        if move == "end":
            queue.end_turn(float(num_ends))
            num_ends += 1
        elif move == "take":
            part = queue.take()
            taken += len(part.audio)
            if part.ended_at is not None:
                assert part.ended_at == taken_ends  # ends are never dropped, nor reordered
                taken_ends += 1
            assert (np.diff(part.audio) == 1).all()  # no holes inside
        else:
            queue.append(samples(total, move), limit)
            total += move
        assert queue.num_samples <= limit
        assert queue.num_samples + queue.num_dropped_samples + taken == total
    while queue.has_ended_turn:
        taken_ends += 1
        queue.take()
    assert taken_ends == num_ends


def test_turns_that_end_faster_than_they_are_heard_become_one():
    """A client that commits without end: what waits stays bounded, and no audio is lost for it."""
    queue = AudioQueue()
    for i in range(1000):
        queue.append(samples(i, 1), 10_000)
        queue.end_turn(float(i))
    assert queue.num_samples == 1000 and queue.num_dropped_samples == 0
    turns = []
    while queue.has_ended_turn:
        turns.append(queue.take())
    assert len(turns) == MAX_TURNS
    assert turns[0].ended_at == 1000.0 - MAX_TURNS and turns[-1].ended_at == 999.0
    assert np.concatenate([turn.audio for turn in turns]).tolist() == list(range(1000))
