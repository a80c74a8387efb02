"""The tick's step, apart from its clock: collect what is due, and hand it out as batches.

Holds the sessions and their slots. `step(now)` is called when a slot comes due (conductor.py keeps the time);
`take_batch` whenever the family can hear again. Neither decodes, waits or writes to a socket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from engine.faults import contained
from engine.outputs import Output
from engine.session import Session
from engine.slots import SlotTable
from engine.types import Hearing

MAX_BATCH = 16  # sessions that are heard at once

OnOutputs = Callable[[Session, Sequence[Output]], None]


@dataclass(frozen=True, slots=True)
class TickSample:
    """What one slot's tick looked like; the admission limit's food."""

    due: float
    lateness_s: tuple[float, ...]  # one for each session that had work due; silent ones give none
    num_sessions: int  # all that have this slot
    num_misses: int  # sessions still busy with an earlier tick when this one came due


@dataclass(slots=True)
class Step:
    samples: list[TickSample] = field(default_factory=list)
    outputs: list[tuple[Session, Sequence[Output]]] = field(default_factory=list)


class TickScheduler:
    def __init__(self, budget_s: float, num_slots: int, max_batch: int) -> None:
        self._slots = SlotTable(budget_s, num_slots)
        self._max_batch = max_batch
        self._sessions: dict[str, Session] = {}
        self._waiting: dict[str, None] = {}  # due, and not heard yet; in the order they became so

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def get(self, session_id: str) -> Session | None:
        return self._sessions.get(session_id)

    def add(self, session: Session) -> None:
        self._sessions[session.id] = session
        self._slots.add(session.id)

    def remove(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)
        self._waiting.pop(session_id, None)
        self._slots.remove(session_id)

    def next_due(self) -> float:
        return self._slots.next_due()

    def step(self, now: float) -> Step:
        """Run every slot that has come due: mark its sessions' work due, sample them, continue answers."""
        step = Step()
        for due, session_ids in self._slots.due(now):
            latenesses: list[float] = []
            num_misses = 0
            for session in (self._sessions[i] for i in session_ids):
                misses_before = session.num_misses
                if outputs := contained(session, self._come_due, session, due, now, latenesses):
                    step.outputs.append((session, outputs))
                num_misses += session.num_misses - misses_before
            step.samples.append(TickSample(due, tuple(latenesses), len(session_ids), num_misses))
        return step

    def _come_due(
        self, session: Session, due: float, now: float, latenesses: list[float]
    ) -> Sequence[Output]:
        session.come_due(due)
        if (lateness := session.take_sample(now)) is not None:
            latenesses.append(lateness)
        outputs = session.go_on(now)
        self.note(session)
        return outputs

    def note(self, session: Session) -> None:
        """Something happened to the session: it may have become due, or ceased to be."""
        if session.is_due and session.id in self._sessions:
            self._waiting[session.id] = None
        else:
            self._waiting.pop(session.id, None)

    def take_batch(self, on_outputs: OnOutputs) -> list[Hearing]:
        """Audio to be heard now, at most `max_batch` sessions; empty when nothing is due.

        Ended turns go first and alone: somebody waits for an answer, while taking in the audio of those who
        still talk only saves time later. `on_outputs` gets the end of a session whose code raises.
        """
        waiting = [self._sessions[i] for i in self._waiting]
        batch = [s for s in waiting if s.is_urgent] or waiting
        batch = batch[: self._max_batch]
        hearings: list[Hearing] = []
        for session in batch:
            del self._waiting[session.id]
        for session in batch:
            if outputs := contained(session, self._take_hearing, session, hearings):
                on_outputs(session, outputs)
        return hearings

    def _take_hearing(self, session: Session, hearings: list[Hearing]) -> Sequence[Output]:
        hearings.append(session.take_hearing())
        return ()
