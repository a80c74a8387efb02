"""One client process of `metronome load`: its share of the callers, its headroom, two reports a second."""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

from app.load_client import Call, Speech
from app.load_figures import Figures
from app.load_plan import Caller, LoadOptions
from app.speaking import at_one_rate, chunks, read_recording

REPORT_S = 0.5
PULSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Report:
    figures: Figures
    is_last: bool


def read_speech(options: LoadOptions) -> Speech:
    """Raises ClientError for a file that cannot be read."""
    recordings, rate = at_one_rate([read_recording(path) for path in options.files])
    return Speech(rate, [chunks(samples, rate) for samples in recordings])


def main(options: LoadOptions, speech: Speech, callers: list[Caller], begin: float, pipe: Connection) -> None:
    """The process's whole life. `begin` is of the machine's monotonic clock, which all processes share."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
    asyncio.run(_run(options, speech, callers, begin, pipe))


async def _run(
    options: LoadOptions, speech: Speech, callers: list[Caller], begin: float, pipe: Connection
) -> None:
    figures, cpu_begin = Figures(), time.process_time()
    calls = [Call(options, caller, speech, figures) for caller in callers]
    stop_at = begin + options.duration_s
    running = asyncio.gather(*(call.run(begin, stop_at) for call in calls))
    loop = asyncio.get_running_loop()

    def stop() -> None:  # the parent says so, or is gone
        loop.remove_reader(pipe.fileno())
        running.cancel()

    loop.add_reader(pipe.fileno(), stop)
    pulse = asyncio.create_task(_pulse(figures))

    def report(is_last: bool) -> None:
        busy_s, wall_s = time.process_time() - cpu_begin, time.monotonic() - begin
        figures.cpu_cores = [round(busy_s / wall_s, 3)] if wall_s > 1 else []
        pipe.send(Report(figures, is_last))

    try:
        while not running.done():
            await asyncio.wait({running}, timeout=REPORT_S)
            if not running.done():
                report(is_last=False)
        if not running.cancelled():
            running.result()
    finally:
        pulse.cancel()
        report(is_last=True)


async def _pulse(figures: Figures) -> None:
    """How late this event loop wakes who slept: what the callers' own clocks are worth."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + PULSE_S
        await asyncio.sleep(PULSE_S)
        figures.loop_delay.add(1000 * max(0.0, loop.time() - due))
