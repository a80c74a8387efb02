"""How fast a full server says no: 100 arrivals a second, on the null engine.

    python -m bench.refusal [--arrivals 2000] [--out bench/results/refusal.json]

All places are taken by sessions that stream audio meanwhile. Timed from the client's connect to its close
frame (TCP and WebSocket handshakes included); server and clients share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path

from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from bench.server_process import machine, served

PLACES = 32
ARRIVALS_PER_S = 100.0
CHUNK = bytes(640)  # 20 ms at 16 kHz


async def occupy(url: str, taken: asyncio.Semaphore) -> None:
    async with connect(url, proxy=None) as socket:
        await socket.recv()
        taken.release()
        reader = asyncio.create_task(_drain(socket))
        try:
            while True:
                await socket.send(CHUNK)
                await asyncio.sleep(0.02)
        finally:
            reader.cancel()


async def _drain(socket) -> None:
    async for _ in socket:
        pass


async def knock(url: str) -> tuple[float, int | None]:
    """Seconds until the close frame, and its code."""
    begin = time.perf_counter()
    async with connect(url, proxy=None) as socket:
        try:
            while True:
                await socket.recv()
        except ConnectionClosed:
            return time.perf_counter() - begin, socket.close_code


async def measure(url: str, arrivals: int) -> list[tuple[float, int | None]]:
    taken = asyncio.Semaphore(0)
    holders = [asyncio.create_task(occupy(url, taken)) for _ in range(PLACES)]
    for _ in range(PLACES):
        await taken.acquire()
    begin, knocks = time.perf_counter(), []
    for i in range(arrivals):
        await asyncio.sleep(begin + i / ARRIVALS_PER_S - time.perf_counter())
        knocks.append(asyncio.create_task(knock(url)))
    results = await asyncio.gather(*knocks)
    for holder in holders:
        holder.cancel()
    await asyncio.gather(*holders, return_exceptions=True)
    return list(results)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--arrivals", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path("bench/results/refusal.json"))
    options = parser.parse_args()
    about = machine()
    with served("--model", "null", "--max-sessions", str(PLACES), "--aimd-initial", str(PLACES)) as server:
        results = asyncio.run(measure(server.url, options.arrivals))
        resident = server.resident_mib()
    times_ms = sorted(1000 * seconds for seconds, _ in results)
    result = {
        "machine": about,
        "arrivals_per_s": ARRIVALS_PER_S,
        "sessions_streaming": PLACES,
        "refused_with_1013": sum(code == 1013 for _, code in results),
        "arrivals": len(results),
        "ms": {f"p{p}": round(times_ms[int(p / 100 * (len(times_ms) - 1))], 2) for p in (50, 90, 99, 100)},
        "server_resident_mib": resident,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
