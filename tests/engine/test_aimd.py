"""The limit in exact steps, then in simulated hours against models of how lateness grows with load."""

import random
from collections.abc import Callable

import pytest

from engine.aimd import AimdConfig, AimdLimit, quantile

B = 2.0
TARGET = 0.3 * B


def make(**changes) -> AimdLimit:
    given = {"budget_s": B, "initial": 10, "maximum": 100, "window_s": 6.0, "cooldown_s": 6.0} | changes
    return AimdLimit(AimdConfig(**given))


def feed(limit: AimdLimit, start_s: float, lateness_s: float, in_flight: int, *, ticks: int, busy: int = 0):
    """One tick a budget with everyone (or `busy`) in it; gives the time of the next."""
    for tick in range(ticks):
        limit.on_tick(start_s + tick * B, [lateness_s] * (busy or in_flight), 0, in_flight)
    return start_s + ticks * B


def test_healthy_and_used_adds_the_constant_once_a_window():
    limit = make()
    caps = []
    for tick in range(10):  # windows end at 6, 12 and 18 s
        caps.append(limit.on_tick(tick * B, [0.1] * 10, 0, 10))
    assert caps == [10, 10, 10, 11, 11, 11, 12, 12, 12, 12]  # at 12 no longer 90 % used
    assert limit.num_growths == 2


def test_the_target_itself_is_too_late_and_cuts_once():
    limit = make()
    feed(limit, 0.0, TARGET, 10, ticks=4)
    assert (limit.cap, limit.num_cuts) == (9.0, 1)


def test_cool_down_ignores_the_load_before_the_cut():
    limit = make(cooldown_s=20.0)
    now = feed(limit, 0.0, 5.0, 10, ticks=4)  # cut at 6 s, deaf until 26 s
    now = feed(limit, now, 5.0, 9, ticks=9)
    assert now == 26.0 and limit.num_cuts == 1
    feed(limit, now, 5.0, 9, ticks=3)
    assert limit.num_cuts == 1
    feed(limit, now + 6.0, 5.0, 9, ticks=1)
    assert limit.num_cuts == 2 and limit.cap == pytest.approx(8.1)


def test_overload_from_sessions_above_the_cap_does_not_grind_it_down():
    """Nobody is evicted: ten long sessions stay late for an hour, and the cap waits for them."""
    limit = make()
    feed(limit, 0.0, 5.0, 10, ticks=1800)
    assert limit.cap == 9.0


def test_nobody_is_cut_for_reaching_the_maximum():
    limit = make(initial=100)
    feed(limit, 0.0, 0.1, 100, ticks=100)
    assert limit.cap == 100.0 and limit.num_cuts == 0


def test_the_minimum_holds():
    limit = make(initial=3, minimum=2)
    feed(limit, 0.0, 9.0, 2, ticks=200)
    assert limit.cap == 2.0


def test_no_growth_unless_nearly_used():
    limit = make()
    feed(limit, 0.0, 0.1, 8, ticks=100)
    assert limit.cap == 10.0
    feed(limit, 200.0, 0.1, 9, ticks=4)
    assert limit.cap == 11.0


def test_few_misses_are_forgiven_more_are_an_overload():
    for misses, cuts in ((1, 0), (2, 1)):  # of 30 samples, 5 % is 1.5
        limit = make()
        for tick in range(4):
            limit.on_tick(tick * B, [0.1] * 10, misses if tick == 1 else 0, 8)
        assert limit.num_cuts == cuts


def test_a_window_waits_for_enough_samples_and_forgets_old_ones():
    limit = make(initial=1, min_samples=8)
    for i in range(8):
        limit.on_tick(i * 4.0, [0.01], 0, 1)
    assert limit.cap == 1.0
    limit.on_tick(32.0, [0.01], 0, 1)
    assert limit.cap == 2.0
    limit = make(initial=1, min_samples=8)
    for i in range(7):
        limit.on_tick(i * 2.0, [9.0], 0, 1)  # late, but an hour ago
    for i in range(8):
        limit.on_tick(3600.0 + i * 2.0, [0.01], 0, 1)
    assert limit.num_cuts == 0


def test_silence_changes_nothing():
    limit = make()
    for tick in range(1000):
        assert limit.on_tick(tick * B, [], 0, 10) == 10


@pytest.mark.parametrize("spike_s", [2.0, 60.0, 1e9])
def test_a_single_spiked_tick_in_any_place_moves_nothing(spike_s: float):
    for spiked in range(2, 12):
        limit = make(used_fraction=1.0, initial=20)
        for tick in range(30):
            limit.on_tick(tick * B, [spike_s if tick == spiked else 0.1] * 10, 0, 10)
        assert limit.cap == 20.0


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6])
def test_a_stall_not_longer_than_the_cool_down_moves_the_cap_by_one_step_at_most(length: int):
    for first in range(12):
        limit = make(used_fraction=1.0, initial=20, cooldown_s=12.0)
        for tick in range(40):
            stalled = first <= tick < first + length
            limit.on_tick(tick * B, [30.0 if stalled else 0.1] * 10, 10 if stalled else 0, 10)
        assert limit.cap in (18.0, 20.0)
        assert length < 4 or limit.cap == 18.0


def test_growth_asks_what_if_all_spoke_at_once():
    """40 admitted, a third busy: the p50 may be a third of the target before growth stops."""
    for lateness, expected in ((0.19, 41.0), (0.2, 40.0)):
        limit = make(initial=40)
        feed(limit, 0.0, lateness, 40, ticks=4, busy=13)
        assert limit.cap == expected


def test_surge_is_bounded_so_that_a_mostly_silent_house_still_grows():
    limit = make(initial=40, max_surge=4.0)
    feed(limit, 0.0, 0.14, 40, ticks=6, busy=2)  # 20 times as many could speak; 4 times is asked of them
    assert limit.cap == 41.0
    limit = make(initial=40, max_surge=4.0)
    feed(limit, 0.0, 0.16, 40, ticks=6, busy=2)
    assert limit.cap == 40.0


def test_recent_looks_back_half_a_minute():
    limit = make()
    assert limit.recent(0.0) == (None, None, 0, 0)
    limit.on_tick(0.0, [9.0], 1, 1)
    assert limit.recent(1.0) == (9.0, 9.0, 1, 1)
    for i in range(100):
        limit.on_tick(31.0 + i / 100, [i / 100], 0, 1)
    recent = limit.recent(32.0)
    assert (recent.p50_s, recent.p99_s, recent.num_samples, recent.num_misses) == (0.49, 0.98, 100, 0)


def test_quantile_is_nearest_rank_from_below():
    assert [quantile([1, 2, 3, 4], q) for q in (0, 0.5, 0.99, 1)] == [1, 2, 3, 4]
    assert quantile([7.0], 0.5) == 7.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"initial": 0},
        {"initial": 101},
        {"minimum": 11},
        {"decrease": 1.0},
        {"budget_s": 0},
        {"max_surge": 0.5},
    ],
)
def test_configurations_without_sense_are_refused(wrong):
    with pytest.raises(ValueError, match="need"):
        make(**wrong)


# simulations

Lateness = Callable[[float], float]  # busy sessions -> median lateness in seconds


def batching(busy: float) -> float:
    """A batch costs a fixed part and one per session: the target is met up to 50 busy sessions."""
    return 0.10 + 0.01 * busy


def queueing(busy: float) -> float:
    """Lateness as in a queue that saturates at 60 busy sessions: 0.6 s is reached at 50."""
    return min(0.1 / max(1 - busy / 60, 1e-3), 30.0)


class House:
    """Sessions that come, stay `stay_s` on average, and have work in a share of their ticks; four slots."""

    def __init__(self, limit: AimdLimit, lateness: Lateness, *, seed: int, share=1.0, stay_s=120.0, rate=2.0):
        self.limit, self.lateness = limit, lateness
        self.share, self.stay_s, self.rate = share, stay_s, rate
        self.random = random.Random(seed)
        self.in_flight = 0
        self.now_s = 0.0
        self.caps: list[int] = []
        self.p50s: list[float] = []

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds / (B / 4))):
            self.now_s += B / 4
            left = sum(self.random.random() < B / 4 / self.stay_s for _ in range(self.in_flight))
            self.in_flight -= left
            arrivals = sum(self.random.random() < self.rate * B / 4 / 8 for _ in range(8))
            self.in_flight += max(0, min(arrivals, self.limit.whole_cap - self.in_flight))
            in_slot = self.in_flight // 4 + (self.random.random() < self.in_flight % 4 / 4)
            busy = sum(self.random.random() < self.share for _ in range(in_slot))
            middle = self.lateness(self.in_flight * self.share)
            late = [middle * self.random.lognormvariate(0, 0.2) for _ in range(busy)]
            self.limit.on_tick(self.now_s, late, sum(x > B for x in late), self.in_flight)
            self.caps.append(self.limit.whole_cap)
            self.p50s.append(middle)


@pytest.mark.parametrize("lateness", [batching, queueing])
@pytest.mark.parametrize("initial", [1, 8, 50, 100])
@pytest.mark.parametrize("seed", [1, 2])
def test_converges_from_any_start_and_stays(lateness: Lateness, initial: int, seed: int):
    house = House(make(initial=initial, maximum=1000), lateness, seed=seed)
    house.run(2000)
    house.caps.clear()
    house.p50s.clear()
    house.run(4000)
    assert 40 <= min(house.caps) and max(house.caps) <= 56  # 50 is right
    assert max(house.caps) - min(house.caps) <= 12
    assert max(house.p50s) < 1.6 * TARGET
    assert sum(p < TARGET * 1.05 for p in house.p50s) > 0.8 * len(house.p50s)


def test_two_thirds_silent_do_not_over_admit():
    """Two in three say nothing. Were they all to speak at once, the median would be near the target still."""
    house = House(make(maximum=1000), batching, seed=3, share=1 / 3)
    house.run(6000)
    admitted = house.in_flight
    assert 25 <= admitted <= 60  # the busy third alone would let in 150
    house.share = 1.0
    assert batching(admitted) < 1.25 * TARGET
    cap = house.limit.cap
    house.p50s.clear()
    house.run(2000)
    assert max(house.p50s) < 1.3 * TARGET and house.limit.cap >= 0.7 * cap


def test_silent_sessions_do_not_hide_late_busy_ones():
    """90 silent beside 10 that are late: no sample of theirs pulls the median down."""
    limit = make(initial=100)
    feed(limit, 0.0, 1.0, 100, ticks=4, busy=10)
    assert limit.cap == 90.0


def test_recovers_after_an_overload_that_passes():
    house = House(make(maximum=1000), batching, seed=4, stay_s=60.0)
    house.run(2000)
    before = house.limit.cap
    house.lateness = lambda busy: 4 * batching(busy)  # the device is throttled: 5 sessions meet the target
    house.run(600)
    assert house.limit.whole_cap < 0.5 * before
    house.lateness = batching
    house.run(1200)
    assert house.limit.cap > 0.85 * before


def test_does_not_swing_wildly():
    house = House(make(maximum=1000), queueing, seed=5)
    house.run(3000)
    cuts, growths = house.limit.num_cuts, house.limit.num_growths
    house.run(6000)  # 1,000 windows
    assert house.limit.num_cuts - cuts <= 200
    assert house.limit.num_growths - growths <= 800
