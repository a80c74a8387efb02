"""A minute of chaos (bench/chaos.py) on a real small engine; when all have left, nothing of them is left.

METRONOME_TEST_CHAOS_S and METRONOME_TEST_CHAOS_SEED ask for longer storms and others.
"""

from __future__ import annotations

import asyncio
import os

import pytest

from bench.chaos import Outcome, chaos

pytestmark = pytest.mark.vllm

DURATION_S = float(os.environ.get("METRONOME_TEST_CHAOS_S", 60))
SEED = int(os.environ.get("METRONOME_TEST_CHAOS_SEED", 1))
MAX_GROWTH_MIB = 256  # pages that 200 callers at once touched first: 100 seen, and 50 after ten minutes


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return asyncio.run(chaos(tmp_path_factory.mktemp("tiny-llama"), SEED, DURATION_S))


def test_the_server_stays_without_fault(outcome: Outcome) -> None:
    record = outcome.record
    assert record.faults == []  # nobody was closed with 1011 or cut off
    assert outcome.complaints == []  # no error in the log
    assert outcome.num_engine_failures == 0


def test_the_storm_was_one(outcome: Outcome) -> None:
    """The test of the test: callers talked, were answered, refused and cut off."""
    record = outcome.record
    assert record.sessions > 100
    assert record.events["response.done"] > 20 and record.events["tick"] > 100
    assert {1000, 1006, 1007, 1009} <= record.closes.keys()
    assert record.actions["vanish"] > 10 and record.actions["flood"] and record.actions["far too big"]
    assert record.errors["wrong_turn_mode"] and record.errors["instructions_too_long"]


@pytest.mark.parametrize(
    "what",
    [
        "permits",
        "sessions",
        "deliveries",
        "works",
        "engine_sessions",
        "kv_blocks",
        "file_handles",
        "threads",
        "tasks",
        "objects",
    ],
)
def test_nothing_is_left(outcome: Outcome, what: str) -> None:
    assert getattr(outcome.after, what) == getattr(outcome.before, what)
    if what not in ("file_handles", "threads", "tasks"):
        left = getattr(outcome.after, what)
        assert not any(left.values()) if isinstance(left, dict) else left == 0


def test_memory_is_back(outcome: Outcome) -> None:
    # What is kept of the last few thousand sessions is two or three objects each; a session is hundreds.
    assert outcome.after.blocks - outcome.before.blocks < 20 * outcome.record.sessions
    assert outcome.after.rss_mib < outcome.before.rss_mib + MAX_GROWTH_MIB


def test_a_fresh_session_works(outcome: Outcome) -> None:
    assert outcome.answer.startswith("w")
