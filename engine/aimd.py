"""How many sessions may be admitted: additive increase, multiplicative decrease. Arithmetic without a clock.

The scheduler reports each tick: how late every session with work in it was, and how many were not done when
they were due again. Lateness is measured from the moment the work was due to its real end (an open work by
its age so far), never a call's own duration, so that waiting shows. A control window collects ticks; then

- p50 >= target, or too many misses: cap *= decrease, once, and what comes in during the cool-down is ignored,
  for it still shows the load before the cut. Nobody is evicted, so while more are in flight than the cap lets
  in the overload says nothing new about the cap, and it stays: otherwise long sessions would grind it to 1.
- p50 under target with the cap nearly used, and a surge would be survived: cap += increase.

**Surge.** A session without work gives no sample, so silent sessions cannot pull the median down. They can
still speak: with N in flight of whom b are busy, growth asks that the p50 times N/b is under the target, i.e.
that all of them could speak at once, lateness growing in proportion (batching makes it grow by less). N/b
is taken as `max_surge` at most, since not everybody does. A cut looks at the plain p50 only.

One spike lies in one window and is a minority of its samples, so the median hides it; a stall that is not
moves the cap by one step, if it is shorter than the cool-down. Reaching the maximum is no reason to cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class AimdConfig:
    """Times in seconds; fractions are of 1."""

    budget_s: float  # B
    target_fraction: float = 0.3  # the p50 to stay under, as a part of B
    initial: int = 8
    minimum: int = 1
    maximum: int = 1024
    increase: float = 1.0  # sessions a window
    decrease: float = 0.9
    used_fraction: float = 0.9  # growth only with this part of the cap in flight
    miss_fraction: float = 0.05  # more misses than this part of the samples is an overload
    max_surge: float = 4.0  # 1: trust that silent sessions stay silent
    window_s: float | None = None  # None: 3 B, at least 3 s
    cooldown_s: float | None = None  # None: two windows
    min_samples: int = 8  # a window goes on until it has as many
    recent_s: float = 30.0  # what `recent` looks back on

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.initial <= self.maximum:
            raise ValueError(
                f"need 1 <= minimum <= initial <= maximum, got {self.minimum}, {self.initial}, {self.maximum}"
            )
        if not (self.budget_s > 0 and 0 < self.target_fraction <= 1 and 0 < self.decrease < 1):
            raise ValueError("need budget_s > 0, target_fraction in (0, 1], decrease in (0, 1)")
        if self.increase <= 0 or self.max_surge < 1 or self.min_samples < 1:
            raise ValueError("need increase > 0, max_surge >= 1, min_samples >= 1")


class Recent(NamedTuple):
    """The last `recent_s` seconds; None where nobody had work."""

    p50_s: float | None
    p99_s: float | None
    num_samples: int
    num_misses: int


class _Tick(NamedTuple):
    at_s: float
    lateness_s: tuple[float, ...]
    num_misses: int


def quantile(ordered: Sequence[float], fraction: float) -> float:
    """Nearest rank from below: with an even count the median is the lower of the middle two."""
    return ordered[int(fraction * (len(ordered) - 1))]


class AimdLimit:
    """The cap. One owner, the scheduler's loop; not thread-safe."""

    MAX_TICKS_KEPT = 4096  # bounds memory should ticks come much faster than slots do

    def __init__(self, config: AimdConfig) -> None:
        self.config = config
        self.window_s = config.window_s or max(3 * config.budget_s, 3.0)
        self.cooldown_s = 2 * self.window_s if config.cooldown_s is None else config.cooldown_s
        self.target_s = config.target_fraction * config.budget_s
        self._cap = float(config.initial)
        self._window: deque[_Tick] = deque(maxlen=self.MAX_TICKS_KEPT)
        self._recent: deque[_Tick] = deque(maxlen=self.MAX_TICKS_KEPT)
        self._window_start_s: float | None = None
        self._ignore_until_s = float("-inf")
        self.num_cuts = 0
        self.num_growths = 0

    @property
    def cap(self) -> float:
        return self._cap

    @property
    def whole_cap(self) -> int:
        """Sessions that may be in flight."""
        return int(self._cap)

    def on_tick(self, now_s: float, lateness_s: Sequence[float], num_misses: int, in_flight: int) -> int:
        """Take in one tick, give the whole cap.

        `lateness_s` has one entry per session that had work in this tick, open ones by their age.
        `num_misses` counts those among them that were not done when due again. `in_flight` counts permits,
        silent sessions included. Times must not run backwards.
        """
        if lateness_s or num_misses:
            tick = _Tick(now_s, tuple(lateness_s), num_misses)
            self._recent.append(tick)
            if now_s >= self._ignore_until_s:
                if self._window_start_s is None:
                    self._window_start_s = now_s  # the tick that opens a window belongs to the time before
                else:
                    self._window.append(tick)
        self._decide(now_s, in_flight)
        return self.whole_cap

    def recent(self, now_s: float) -> Recent:
        """Figures for people and dashboards; the control window is another."""
        while self._recent and self._recent[0].at_s < now_s - self.config.recent_s:
            self._recent.popleft()
        ordered = sorted(late for tick in self._recent for late in tick.lateness_s)
        if not ordered:
            return Recent(None, None, 0, 0)
        misses = sum(tick.num_misses for tick in self._recent)
        return Recent(quantile(ordered, 0.5), quantile(ordered, 0.99), len(ordered), misses)

    def _decide(self, now_s: float, in_flight: int) -> None:
        """At a window's end, move the cap by one step or leave it, and begin the next window."""
        if self._window_start_s is None or now_s - self._window_start_s < self.window_s:
            return
        # Samples too old to say anything: one caller who rarely speaks may stretch a window over minutes.
        while self._window and self._window[0].at_s < now_s - 10 * self.window_s:
            self._window.popleft()
        if not self._window:
            self._window_start_s = None
            return
        self._window_start_s = max(self._window_start_s, self._window[0].at_s)
        ordered = sorted(late for tick in self._window for late in tick.lateness_s)
        if len(ordered) < self.config.min_samples:
            return
        misses = sum(tick.num_misses for tick in self._window)
        length_s = now_s - self._window_start_s
        self._window.clear()
        self._window_start_s = now_s

        p50_s = quantile(ordered, 0.5)
        if p50_s >= self.target_s or misses > self.config.miss_fraction * len(ordered):
            if in_flight <= self.whole_cap:
                self._cut(now_s)
        elif in_flight >= self.config.used_fraction * self.whole_cap:
            # A session with work gives one sample a budget.
            busy = min(float(in_flight), len(ordered) * self.config.budget_s / max(length_s, self.window_s))
            surge = min(in_flight / busy, self.config.max_surge)
            if p50_s * surge < self.target_s and self._cap < self.config.maximum:
                self._cap = min(self._cap + self.config.increase, float(self.config.maximum))
                self.num_growths += 1

    def _cut(self, now_s: float) -> None:
        self._ignore_until_s = now_s + self.cooldown_s
        self._window_start_s = None
        cap = max(self._cap * self.config.decrease, float(self.config.minimum))
        if cap < self._cap:
            self._cap = cap
            self.num_cuts += 1
