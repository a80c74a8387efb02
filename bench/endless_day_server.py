"""A day of turns through one socket of the real server, over an engine that costs nothing: does it grow?

    python -m bench.endless_day_server [--turns 43200]

endless_day.py drives the engine; this is everything around it: socket, session, scheduler, conversation,
events. A turn is 20 ms of audio, a commit and an answer of four tokens, each as soon as the one before is
over; 43,200 of them are 24 h at B = 2 s. The client is in the process too. Writes server.json where
endless_day_report.py finds it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.endless_day_meter import (
    NUM_LEFT_OUT,
    NUM_STRETCHES,
    Meter,
    slopes,
    without_malloc_caches,
)
from bench.provenance import provenance
from engine.null import DEFAULT_LIMITS, NullEngine
from tests.support.serving import serving
from tests.support.stage import pcm

BUDGET_S, MAX_TOKENS = 2.0, 4


def endless() -> NullEngine:
    return NullEngine(replace(DEFAULT_LIMITS, max_session_tokens=None))


async def measure(num_turns: int) -> dict[str, Any]:
    meter, per_stretch = Meter("cpu", 1, NUM_STRETCHES), num_turns // NUM_STRETCHES
    started = time.perf_counter()
    async with (
        serving(make_engine=endless, session__max_messages_per_s=100_000) as server,
        server.client(turn="manual", max_tokens=MAX_TOKENS) as client,
    ):
        meter.begin()
        for number in range(1, NUM_STRETCHES * per_stretch + 1):
            await client.forgetful_turn(pcm(0.02))
            meter.tick(math.nan, math.nan)
            if number % per_stretch == 0:
                meter.end(number * BUDGET_S / 3600)
    return {
        "what": "the server around the engine, a null engine in it",
        "plan": {
            "model": "server",
            "num_sessions": 1,
            "intake": "20 ms of audio, a turn each,",
            "num_decoded": MAX_TOKENS,
            "budget_s": BUDGET_S,
        },
        **provenance("cpu"),
        "hours": round(NUM_STRETCHES * per_stretch * BUDGET_S / 3600, 3),
        "ticks": NUM_STRETCHES * per_stretch,
        "took_s": round(time.perf_counter() - started, 1),
        "broke": None,
        "slopes_from_row": NUM_LEFT_OUT,
        "stretches": meter.rows(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--turns", type=int, default=43_200)
    parser.add_argument("--out", type=Path, default=Path("bench/results/endless_day"))
    options = parser.parse_args()
    without_malloc_caches("bench.endless_day_server")
    report = asyncio.run(measure(options.turns))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "server.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(slopes(report), indent=1))


if __name__ == "__main__":
    main()
