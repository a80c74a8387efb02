"""Who calls when, how long, and how badly behaved: drawn once from a seed, so that a run can be repeated."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Arrival = Literal["steady", "poisson", "burst", "step"]
Lengths = Literal["fixed", "uniform", "exponential"]
Turn = Literal["server_vad", "manual", "continuous"]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What `metronome load` was asked for; times in seconds. Its help explains each."""

    url: str
    files: tuple[Path, ...]
    clients: int = 8
    duration_s: float = 60.0
    turn: Turn = "server_vad"
    arrival: Arrival = "steady"
    per_s: float = 2.0
    step_clients: int = 4
    step_s: float = 10.0
    session_s: float | None = None
    lengths: Lengths = "exponential"
    pause_s: float = 2.0
    wait_s: float = 30.0
    vanish: float = 0.0
    slow: float = 0.0
    repeat: bool = False
    voice: bool = False
    processes: int | None = None
    key: str | None = None
    seed: int = 0


class Manner(enum.StrEnum):
    POLITE = "polite"
    VANISHES = "vanishes"  # its connection is cut in the middle, without a close
    READS_SLOWLY = "reads_slowly"


@dataclass(frozen=True, slots=True)
class Caller:
    number: int
    arrives_s: float  # after the start
    manner: Manner
    seed: int


def plan(options: LoadOptions) -> list[Caller]:
    """Every caller, in the order of arrival. Vanishing and slow ones are spread evenly among them."""
    rng = random.Random(options.seed)
    manners = _manners(options, rng)
    return [Caller(i, at, manners[i], rng.randrange(2**32)) for i, at in enumerate(_arrivals(options, rng))]


def session_length_s(options: LoadOptions, rng: random.Random) -> float:
    """Of one session; mean `session_s`."""
    mean = options.session_s
    if mean is None:
        return float("inf")
    if options.lengths == "uniform":
        return rng.uniform(0.5 * mean, 1.5 * mean)
    return rng.expovariate(1 / mean) if options.lengths == "exponential" else mean


def _arrivals(options: LoadOptions, rng: random.Random) -> list[float]:
    count = options.clients
    match options.arrival:
        case "burst":
            return [0.0] * count
        case "step":
            return [i // options.step_clients * options.step_s for i in range(count)]
        case "steady":
            return [i / options.per_s for i in range(count)]
        case "poisson":
            at, times = 0.0, []
            for _ in range(count):
                at += rng.expovariate(options.per_s)
                times.append(at)
            return times


def _manners(options: LoadOptions, rng: random.Random) -> list[Manner]:
    vanishing, slow = round(options.vanish * options.clients), round(options.slow * options.clients)
    odd = [Manner.VANISHES] * vanishing + [Manner.READS_SLOWLY] * slow
    manners = odd + [Manner.POLITE] * (options.clients - len(odd))
    rng.shuffle(manners)
    return manners[: options.clients]
