"""Chaos with a seed: 200 callers who do all that callers do, right and wrong, on a real small engine.

    python -m bench.chaos [--minutes 10] [--seed 1] [--callers 200]

Real sockets and a real vLLM engine (2 layers, a window of 64 tokens, so that sessions are compacted all the
time; no recogniser: tests/support/energy_family.py). Callers come at random and speak, fall silent, commit,
cancel, change instructions, send bad JSON, floods and messages too large, read slowly or not at all, vanish.
When the last has gone, nothing may be left of them: permits, sessions, KV blocks, tasks, file handles,
objects, memory. tests/chaos/ runs a minute of the same.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import json
import logging
import os
import random
import socket
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidMessage

from engine.vllm.environment import prepare_process, repair_torch_companions
from engine.vllm.settings import VllmSettings
from tests.support.energy_family import EnergyFamily
from tests.support.serving import Serving, serving
from tests.support.voices import ToneVoice

RATES = (8000, 16_000, 24_000, 48_000)
MODES = ("server_vad", "manual", "continuous")
MAX_MESSAGE_BYTES = 65_536
ANSWERED_CLOSES = {1000, 1003, 1007, 1008, 1009, 1013}  # whatever a caller did; 1011 would be our fault
SPEECH = Path(__file__).parents[1] / "tests" / "data" / "speech" / "austen-0880.wav"
KINDS = ("Session", "Outbox", "Inbox", "Connection", "Conversation", "Request", "_Session", "EnergyEar")
WORDS = ("be", "brief", "kind", "slow", "loud", "clear", "and", "never", "always", "speak")


@dataclass
class Record:
    """What happened to all callers."""

    sessions: int = 0
    events: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    closes: Counter[int] = field(default_factory=Counter)
    actions: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)  # what a server must never do


class Caller:
    """One person who calls again and again. All choices come from its own generator."""

    def __init__(self, number: int, seed: int, port: int, speech: np.ndarray, record: Record) -> None:
        self._rng = random.Random(f"{seed}:{number}")
        self._port = port
        self._speech = speech
        self._record = record
        self._rate = 16_000

    async def live(self, until: float) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._rng.uniform(0.0, 3.0))
        while loop.time() < until:
            if self._rng.random() < 0.03:
                await self._knock()
            with contextlib.suppress(OSError, InvalidHandshake, InvalidMessage, TimeoutError):
                await self._call(until)
            await asyncio.sleep(self._rng.expovariate(1 / 0.5))

    async def _knock(self) -> None:
        """Not even a WebSocket."""
        self._record.actions["junk connection"] += 1
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(self._rng.randbytes(self._rng.randrange(200)))
            await asyncio.sleep(self._rng.uniform(0, 0.2))
            writer.transport.abort()

    async def _call(self, until: float) -> None:
        rng, loop = self._rng, asyncio.get_running_loop()
        self._rate = rng.choice(RATES)
        query = {"sample_rate": self._rate, "turn": rng.choice(MODES), "max_tokens": rng.choice((1, 8, 40))}
        if rng.random() < 0.3:
            query["voice"] = "on"
        if rng.random() < 0.03:
            query[rng.choice(list(query))] = "nonsense"
        is_slow = rng.random() < 0.1
        text = "&".join(f"{name}={value}" for name, value in query.items())
        # Small buffers, so that one who does not read is felt.
        peer = socket.create_connection(("127.0.0.1", self._port))
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192 if is_slow else 262_144)
        peer.setblocking(False)
        url = f"ws://127.0.0.1:{self._port}/v1/stream?{text}"
        async with connect(url, sock=peer, max_queue=4, open_timeout=60, close_timeout=5) as line:
            self._record.sessions += 1
            leaving = asyncio.Event()
            reader = asyncio.create_task(self._read(line, is_slow, leaving))
            try:
                end = min(until, loop.time() + rng.expovariate(1 / 12))
                while loop.time() < end and not reader.done():
                    await self._act(line)
            except ConnectionClosed:
                pass
            finally:
                leaving.set()
                if reader.done() or rng.random() < 0.5:
                    await line.close()
                else:
                    self._record.actions["vanish"] += 1
                    line.transport.abort()
                await reader

    async def _read(self, line: ClientConnection, is_slow: bool, leaving: asyncio.Event) -> None:
        last: dict[str, Any] = {}
        try:
            while True:
                if is_slow and not leaving.is_set():
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(leaving.wait(), self._rng.uniform(0.5, 5.0))
                message = await line.recv()
                if isinstance(message, bytes):
                    continue
                last = json.loads(message)
                self._record.events[last["type"]] += 1
                if last["type"] == "error":
                    self._record.errors[last["code"]] += 1
        except ConnectionClosed:
            pass
        code = line.close_code or 0
        self._record.closes[code] += 1
        by_peer = line.protocol.close_rcvd is not None and line.protocol.close_rcvd_then_sent
        if by_peer and code not in ANSWERED_CLOSES:
            self._record.faults.append(f"closed with {code} after {last}")

    async def _act(self, line: ClientConnection) -> None:
        actions: Sequence[tuple[float, str, Callable[[ClientConnection], Awaitable[None]]]] = (
            (8, "speak", self._speak),
            (4, "silence", self._silence),
            (2, "noise", self._noise),
            (4, "commit", lambda line: self._say(line, type="input.commit")),
            (2, "cancel", lambda line: self._say(line, type="response.cancel")),
            (1, "played", self._played),
            (2, "update", self._update),
            (1, "ping", lambda line: self._say(line, type="ping")),
            (2, "pause", lambda line: asyncio.sleep(self._rng.uniform(0.0, 3.0))),
            (1, "odd bytes", lambda line: line.send(self._rng.randbytes(self._rng.choice((0, 1, 3, 641))))),
            (0.5, "unknown event", lambda line: self._say(line, type="hello", x=[1])),
            (0.2, "bad JSON", lambda line: line.send('{"type": ')),
            (0.2, "not UTF-8", lambda line: line.send(b"\xff\xfe\xfd", text=True)),
            (0.2, "too big", lambda line: line.send(bytes(MAX_MESSAGE_BYTES + 1))),
            (0.1, "far too big", lambda line: line.send(bytes(5 * MAX_MESSAGE_BYTES))),
            (0.2, "flood", self._flood),
        )
        weights = [weight for weight, _, _ in actions]
        _, name, action = self._rng.choices(actions, weights)[0]
        self._record.actions[name] += 1
        await action(line)

    async def _say(self, line: ClientConnection, **message: Any) -> None:
        await line.send(json.dumps(message))

    async def _stream(self, line: ClientConnection, samples: np.ndarray) -> None:
        """In pieces of 20 to 200 ms, in real time or faster."""
        pace = self._rng.choice((1.0, 1.0, 0.3))
        start = 0
        while start < len(samples):
            size = self._rng.randrange(self._rate // 50, self._rate // 5)
            await line.send(samples[start : start + size].tobytes())
            start += size
            await asyncio.sleep(pace * size / self._rate)

    async def _speak(self, line: ClientConnection) -> None:
        start = self._rng.randrange(len(self._speech) // 2)
        await self._stream(
            line, self._speech[start : start + round(self._rng.uniform(0.2, 2.0) * self._rate)]
        )

    async def _silence(self, line: ClientConnection) -> None:
        await self._stream(line, np.zeros(round(self._rng.uniform(0.2, 1.5) * self._rate), np.int16))

    async def _noise(self, line: ClientConnection) -> None:
        await self._stream(line, np.frombuffer(self._rng.randbytes(2 * self._rate), np.int16))

    async def _update(self, line: ClientConnection) -> None:
        words = " ".join(self._rng.choices(WORDS, k=self._rng.choice((0, 3, 12, 300))))
        turn = self._rng.choice((*MODES, None))
        changes = {"instructions": words, "turn": turn, "max_tokens": self._rng.choice((1, 20))}
        await self._say(line, type="session.update", **{k: v for k, v in changes.items() if v is not None})

    async def _played(self, line: ClientConnection) -> None:
        await self._say(line, type="response.played", response_id="none", played_ms=self._rng.randrange(9999))

    async def _flood(self, line: ClientConnection) -> None:
        for _ in range(self._rng.choice((200, 1500))):
            await line.send(b"\0\0")


@dataclass(frozen=True)
class Holdings:
    """What a server holds when nobody calls."""

    permits: int
    sessions: int
    deliveries: int
    works: int
    engine_sessions: int
    kv_blocks: int
    file_handles: int
    threads: int
    tasks: dict[str, int]
    objects: dict[str, int]
    blocks: int  # of Python's allocator: all of its objects
    rss_mib: float

    @classmethod
    def of(cls, server: Serving) -> Holdings:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # freed memory goes back, so that RSS is what is held
        conductor = server.service.conductor
        assert conductor.engine is not None
        stats = conductor.engine.stats()
        kinds = Counter(type(found).__name__ for found in gc.get_objects())
        tasks = Counter(task.get_coro().__qualname__ for task in asyncio.all_tasks())  # type: ignore[union-attr]
        return cls(
            permits=server.service.gate.in_flight,
            sessions=len(conductor.scheduler),
            deliveries=len(conductor._deliver),
            works=len(conductor._outbox),
            engine_sessions=stats.num_sessions,
            kv_blocks=stats.kv_blocks_used,
            file_handles=len(os.listdir("/proc/self/fd")),
            threads=threading.active_count(),
            tasks=dict(sorted(tasks.items())),
            objects={name: kinds[name] for name in KINDS},
            blocks=sys.getallocatedblocks(),
            rss_mib=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20,
        )


@contextlib.asynccontextmanager
async def small_server(directory: Path, max_sessions: int) -> AsyncIterator[Serving]:
    """vLLM with a tiny Llama on the CPU, its window so small that sessions are compacted again and again."""
    prepare_process("cpu", 1)
    repair_torch_companions()
    from engine.vllm.engine import VllmEngine
    from tests.support import tiny_llama

    recipe = tiny_llama.build(directory)
    settings = VllmSettings(
        max_sessions=max_sessions + 1,
        kv_cache_bytes=64 << 20,
        window_tokens=64,
        max_sink_tokens=32,
        max_chunk_tokens=64,
        compaction_slack_tokens=64,
    )
    async with serving(
        EnergyFamily(recipe),
        lambda: VllmEngine(recipe, settings),
        voice=ToneVoice(),
        max_sessions=max_sessions,
        aimd__initial=max_sessions,
        aimd__minimum=max(1, max_sessions // 2),
        session__max_message_bytes=MAX_MESSAGE_BYTES,
        session__idle_limit_s=20,
        session__max_age_s=45,
    ) as server:
        yield server


async def storm(server: Serving, num_callers: int, seed: int, duration_s: float) -> Record:
    """All callers until the time is over, then until nothing is left of them."""
    import soundfile

    speech, _ = soundfile.read(SPEECH, dtype="int16")
    record = Record()
    callers = [Caller(number, seed, server.port, speech, record) for number in range(num_callers)]
    until = asyncio.get_running_loop().time() + duration_s
    await asyncio.gather(*(caller.live(until) for caller in callers))
    await server.until_empty()
    await settled()
    return record


async def settled() -> None:
    """Until the tasks of sockets that are closing have ended (app/connection.py gives them 15 s)."""
    for _ in range(600):
        names = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]  # type: ignore[union-attr]
        if not any("run_asgi" in name or "stream" in name for name in names):
            return
        await asyncio.sleep(0.05)


async def talk(server: Serving) -> str:
    """A fresh caller's turn; the answer's text."""
    async with server.client(turn="manual", max_tokens=8) as client:
        await client.audio((np.sin(np.arange(16_000) / 10) * 9000).astype(np.int16).tobytes())
        await client.say(type="input.commit")
        await client.until("response.done")
        return client.text()


class Complaints(logging.Handler):
    """Errors that the server logged: there must be none."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@dataclass
class Outcome:
    record: Record
    before: Holdings  # after a first, shorter storm, when all that is lazy has been made
    after: Holdings
    complaints: list[str]
    num_engine_failures: int
    answer: str  # of a fresh session


async def chaos(directory: Path, seed: int, duration_s: float, num_callers: int = 200) -> Outcome:
    complaints = Complaints()
    logging.getLogger().addHandler(complaints)
    try:
        async with small_server(directory, max_sessions=num_callers * 9 // 10) as server:
            await talk(server)
            await storm(server, num_callers, seed + 1, duration_s / 4)
            before = Holdings.of(server)
            record = await storm(server, num_callers, seed, 3 * duration_s / 4)
            answer = await talk(server)
            await server.until_empty()
            await settled()
            after = Holdings.of(server)
            failures = server.service.conductor.num_engine_failures
    finally:
        logging.getLogger().removeHandler(complaints)
    return Outcome(record, before, after, complaints.lines, failures, answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--callers", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("bench/results/chaos.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        outcome = asyncio.run(chaos(Path(directory), options.seed, 60 * options.minutes, options.callers))
    record = outcome.record
    result = {
        "command": f"python -m bench.chaos --minutes {options.minutes:g} --seed {options.seed}",
        "sessions": record.sessions,
        "actions": dict(record.actions.most_common()),
        "events": dict(record.events.most_common()),
        "errors": dict(record.errors.most_common()),
        "closes": dict(record.closes.most_common()),
        "faults": record.faults,
        "complaints": outcome.complaints,
        "engine_failures": outcome.num_engine_failures,
        "before": vars(outcome.before),
        "after": vars(outcome.after),
        "fresh_answer": outcome.answer,
    }
    text = json.dumps(result, indent=1)
    print(text)
    options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
