"""Endpointer: exact positions from made-up probabilities."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.audio.endpoint import Edge, Endpoint, Endpointer, EndpointerConfig

W = 512  # samples of a window


def endpointer(**changes: float) -> Endpointer:
    """4 windows of speech start, 5 of silence stop, no pre-roll."""
    values = dict(min_speech_ms=128, stop_silence_ms=160, pre_roll_ms=0)
    return Endpointer(EndpointerConfig(**(values | changes)))  # type: ignore[arg-type]


def test_a_turn() -> None:
    ears = endpointer()
    assert ears.push([0.0] * 10 + [0.9] * 3) == []
    assert ears.push([0.9]) == [Endpoint(Edge.STARTED, 10 * W)]
    assert ears.is_speaking
    assert ears.push([0.9] * 6 + [0.0] * 4) == []
    assert ears.push([0.0]) == [Endpoint(Edge.STOPPED, 25 * W)]
    assert not ears.is_speaking


def test_pre_roll_reaches_back_but_not_into_the_turn_before() -> None:
    ears = endpointer(pre_roll_ms=320)
    first = ears.push([0.0] * 20 + [0.9] * 4 + [0.0] * 5)
    assert first == [Endpoint(Edge.STARTED, 10 * W), Endpoint(Edge.STOPPED, 29 * W)]
    assert ears.push([0.0] + [0.9] * 4) == [Endpoint(Edge.STARTED, 29 * W)]
    assert endpointer(pre_roll_ms=320).push([0.9] * 4) == [Endpoint(Edge.STARTED, 0)]


def test_short_sounds_start_nothing() -> None:
    assert endpointer().push(([1.0] * 3 + [0.0]) * 50) == []


def test_hysteresis() -> None:
    """Between the thresholds speech neither starts nor ends."""
    ears = endpointer()
    assert ears.push([0.45] * 30) == []
    ears.push([0.9] * 4)
    assert ears.push([0.45] * 30) == []
    assert ears.push([0.3] * 5)[0].edge is Edge.STOPPED


def test_a_pause_shorter_than_the_end_does_not_end() -> None:
    ears = endpointer()
    ears.push([0.9] * 4)
    assert ears.push(([0.0] * 4 + [0.9]) * 6) == []


@given(st.lists(st.sampled_from([0.0, 0.4, 0.6, 1.0]), max_size=400), st.integers(1, 30))
def test_edges_alternate_and_positions_never_go_back(probabilities: list[float], step: int) -> None:
    whole = endpointer(pre_roll_ms=200).push(probabilities)
    ears = endpointer(pre_roll_ms=200)
    pieces = [e for i in range(0, len(probabilities), step) for e in ears.push(probabilities[i : i + step])]
    assert pieces == whole
    speaking, position = False, 0
    for endpoint in whole:
        assert (endpoint.edge is Edge.STARTED) is not speaking
        assert position <= endpoint.position <= len(probabilities) * W
        speaking, position = endpoint.edge is not Edge.STOPPED, endpoint.position
    assert speaking is ears.is_speaking


@pytest.mark.parametrize(
    "bad",
    [
        {"threshold": 1.1},
        {"release": 0.6},
        {"release": 0.0},
        {"min_speech_ms": 0},
        {"stop_silence_ms": 0},
        {"pre_roll_ms": -1},
    ],
)
def test_refuses_senseless_settings(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"not|must"):
        EndpointerConfig(**bad)  # type: ignore[arg-type]
