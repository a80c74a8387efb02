"""Slots over the budget: who is due when. Even work over B instead of everyone at once (design.md, Time)."""

from __future__ import annotations

from collections.abc import Iterator


class SlotTable:
    """`num_slots` equal parts of B; a session gets the slot with the least work, and keeps it.

    Work is counted in sessions: what a session costs in its next ticks cannot be known when it arrives, and
    over many sessions the counts are what stays even. Times are seconds of the caller's clock.
    """

    def __init__(self, budget_s: float, num_slots: int) -> None:
        if budget_s <= 0 or num_slots < 1:
            raise ValueError(f"SlotTable: need budget_s > 0 and num_slots >= 1, got {budget_s}, {num_slots}")
        self.slot_s = budget_s / num_slots
        self._slots: list[dict[str, None]] = [{} for _ in range(num_slots)]  # dicts keep the order of arrival
        self._slot_of: dict[str, int] = {}
        self._next: int | None = None  # number of the next slot to come due, counted from the clock's zero

    def __len__(self) -> int:
        return len(self._slot_of)

    def loads(self) -> list[int]:
        return [len(slot) for slot in self._slots]

    def add(self, session_id: str) -> int:
        """Place a session; among the least loaded slots in the one whose turn comes last."""
        start = self._next or 0
        order = [(start - 1 - i) % len(self._slots) for i in range(len(self._slots))]
        slot = min(order, key=lambda i: len(self._slots[i]))
        self._slots[slot][session_id] = None
        self._slot_of[session_id] = slot
        return slot

    def remove(self, session_id: str) -> None:
        slot = self._slot_of.pop(session_id, None)
        if slot is None:
            return
        del self._slots[slot][session_id]
        self._level()

    def _level(self) -> None:
        """Churn can empty some slots and leave others full: move one session when the gap exceeds one.

        Its next tick comes up to B early or late, once; an uneven table would cost every tick.
        """
        fullest = max(range(len(self._slots)), key=lambda i: len(self._slots[i]))
        emptiest = min(range(len(self._slots)), key=lambda i: len(self._slots[i]))
        if len(self._slots[fullest]) - len(self._slots[emptiest]) > 1:
            moved, _ = self._slots[fullest].popitem()
            self._slots[emptiest][moved] = None
            self._slot_of[moved] = emptiest

    def due(self, now: float) -> Iterator[tuple[float, list[str]]]:
        """Each slot that came due since the last call, with the time it was due and its sessions.

        A caller that was held up for more than B gets every slot once: the missed rounds are not repeated.
        """
        current = int(now // self.slot_s)
        if self._next is None:
            self._next = current
        first = max(self._next, current - len(self._slots) + 1)
        self._next = current + 1
        for number in range(first, current + 1):
            yield number * self.slot_s, list(self._slots[number % len(self._slots)])

    def next_due(self) -> float:
        """When the next slot comes due."""
        return 0.0 if self._next is None else self._next * self.slot_s
