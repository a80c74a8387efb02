"""Slots stay even under churn, and come due in order whatever the clock does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.slots import SlotTable


def test_sessions_spread_evenly():
    table = SlotTable(2.0, 8)
    for i in range(20):
        table.add(str(i))
    assert sorted(table.loads()) == [2, 2, 2, 2, 3, 3, 3, 3]


@given(st.lists(st.integers(0, 40), max_size=300), st.integers(1, 12))
def test_loads_differ_by_at_most_one_after_any_churn(moves: list[int], num_slots: int):
    table = SlotTable(1.0, num_slots)
    present: set[str] = set()
    for move in moves:
        name = str(move)
        if name in present:
            table.remove(name)
            present.remove(name)
        else:
            table.add(name)
            present.add(name)
        assert max(table.loads()) - min(table.loads()) <= 1
        assert sum(table.loads()) == len(present) == len(table)


def test_every_session_is_due_once_a_budget():
    table = SlotTable(2.0, 8)
    for i in range(20):
        table.add(str(i))
    list(table.due(100.0))
    counts = dict.fromkeys(map(str, range(20)), 0)
    for tick in range(1, 81):  # ten budgets, a call every quarter of a slot... and a slot is 0.25 s
        for due, names in table.due(100.0 + tick * 0.25):
            assert due <= 100.0 + tick * 0.25 < due + 0.25 + 1e-9
            for name in names:
                counts[name] += 1
    assert set(counts.values()) == {10}


def test_a_caller_that_was_held_up_gets_each_slot_once():
    table = SlotTable(2.0, 8)
    for i in range(8):
        table.add(str(i))
    list(table.due(100.0))
    late = [name for _, names in table.due(160.0) for name in names]
    assert sorted(late) == sorted(map(str, range(8)))
    assert list(table.due(160.0)) == []
    assert table.next_due() == 160.25


def test_the_moved_session_keeps_being_due():
    table = SlotTable(1.0, 2)
    for name in "abcd":
        table.add(name)
    for name in [n for n in "abcd" if table._slot_of[n] == 0]:
        table.remove(name)
    assert table.loads() == [1, 1]
    list(table.due(10.0))
    assert len([n for _, names in table.due(11.0) for n in names]) == 2


def test_unknown_sessions_are_no_matter():
    SlotTable(1.0, 2).remove("nobody")
