"""What a client process counts, and how several processes' counts become one. No I/O, bounded."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

_LEAST_MS = 0.1
_RATIO = 1.05


@dataclass
class Histogram:
    """Milliseconds in buckets 5 % wide: a quantile is at most so much too high, hours fit into a few kB."""

    buckets: Counter[int] = field(default_factory=Counter)
    max_ms: float = 0.0

    def add(self, value_ms: float) -> None:
        index = 0 if value_ms <= _LEAST_MS else math.ceil(math.log(value_ms / _LEAST_MS) / math.log(_RATIO))
        self.buckets[index] += 1
        self.max_ms = max(self.max_ms, value_ms)

    @property
    def count(self) -> int:
        return self.buckets.total()

    def quantile_ms(self, fraction: float) -> float | None:
        """None without samples."""
        rank = math.ceil(fraction * self.count)
        for index in sorted(self.buckets):
            rank -= self.buckets[index]
            if rank <= 0:
                return round(min(self.max_ms, _LEAST_MS * _RATIO**index), 1)
        return None

    def merge(self, other: Histogram) -> None:
        self.buckets.update(other.buckets)
        self.max_ms = max(self.max_ms, other.max_ms)

    def as_dict(self) -> dict[str, Any]:
        quantiles = {f"p{p}_ms": self.quantile_ms(p / 100) for p in (50, 90, 99)}
        return {"count": self.count, **quantiles, "max_ms": round(self.max_ms, 1) if self.count else None}


@dataclass
class Figures:
    """One client process's, or all together. Numbers, counters and histograms add up."""

    # sessions
    attempts: int = 0
    active: int = 0
    accepted: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by error code
    failed: Counter[str] = field(default_factory=Counter)  # could not connect, by what it was
    closed_by_server: Counter[str] = field(default_factory=Counter)  # by close code; refusals too
    ended_by_client: Counter[str] = field(default_factory=Counter)  # left, vanished
    connect: Histogram = field(default_factory=Histogram)  # to session.created
    # talk
    turns: int = 0
    unanswered: int = 0
    answers: Counter[str] = field(default_factory=Counter)  # by reason
    first_text: Histogram = field(default_factory=Histogram)  # from the recording's last sample
    first_sound: Histogram = field(default_factory=Histogram)  # the same, for spoken answers
    errors: Counter[str] = field(default_factory=Counter)  # by code; refusals are not among them
    warnings: Counter[str] = field(default_factory=Counter)  # by code
    bytes_out: int = 0
    bytes_in: int = 0
    # time
    client_lateness: Histogram = field(default_factory=Histogram)  # as load_client.py measures it
    server_lateness: Histogram = field(default_factory=Histogram)  # lateness_ms of tick events
    ticks_over_budget: int = 0
    # the client's own headroom
    slip: Histogram = field(default_factory=Histogram)  # chunks begun late
    blocked: Histogram = field(default_factory=Histogram)  # sends the socket did not take at once
    loop_delay: Histogram = field(default_factory=Histogram)
    cpu_cores: list[float] = field(default_factory=list)  # each process's, since the start

    def merge(self, other: Figures) -> None:
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if isinstance(mine, Counter):
                mine.update(theirs)
            elif isinstance(mine, Histogram):
                mine.merge(theirs)
            else:
                setattr(self, each.name, mine + theirs)

    def as_dict(self) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, Histogram):
                value = value.as_dict()
            shown[each.name] = dict(value) if isinstance(value, Counter) else value
        return shown


SLIP_LIMIT_MS = 20.0  # a chunk's length: from here on the client's lateness shows in the server's figures
CPU_LIMIT = 0.85


def doubts(figures: Figures) -> list[str]:
    """Why these figures may be the client machine's rather than the server's; empty: trust them."""
    found = []
    for what, histogram in (("chunks were sent", figures.slip), ("the event loop woke", figures.loop_delay)):
        late = histogram.quantile_ms(0.99)
        if late is not None and late > SLIP_LIMIT_MS:
            found.append(f"{what} {late:g} ms late at p99, over {SLIP_LIMIT_MS:g} ms")
    busiest = max(figures.cpu_cores, default=0.0)
    if busiest > CPU_LIMIT:
        found.append(f"a client process used {busiest:.2f} of its one core, over {CPU_LIMIT:g}")
    return found
