"""Random and mutated messages over real WebSockets, against real uvicorn with the null engine.

12,000 messages with a fixed seed; METRONOME_TEST_FUZZ_MESSAGES=100000 is the full run,
METRONOME_TEST_FUZZ_SEED another one.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import tracemalloc
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.protocol import State

from app import connection
from app.connection import Connection
from app.outbox import Outbox
from engine.session import Session
from tests.fuzz.grammar import Grammar
from tests.fuzz.messages import Messages
from tests.support.serving import TIMEOUT_S, Serving, serving
from tests.support.stage import pcm
from tests.support.voices import ToneVoice

NUM_MESSAGES = int(os.environ.get("METRONOME_TEST_FUZZ_MESSAGES", 12_000))
SEED = int(os.environ.get("METRONOME_TEST_FUZZ_SEED", 4))
NUM_CLIENTS = 8
ALLOWED_CLOSES = {1000, 1003, 1007, 1008, 1009, 1013}  # of these only our own side's fault, 1011, is missing
NUM_BEATS = 3  # the conductor's loops: the variable of each names its last session until the next comes
KEPT_BYTES = 1 << 18  # left allocated by bounded memories: the null engine's of ended sessions, the gate's


@dataclass
class Done:
    """What all clients did together."""

    num_messages: int = 0
    num_sessions: int = 0
    num_events: int = 0
    closes: dict[int | None, int] = field(default_factory=dict)


async def fuzz(server: Serving, num_messages: int, seed: int) -> Done:
    """Clients come, say what they say and go, one way or another, until so many messages were sent."""
    done = Done()
    await asyncio.gather(*(_client(server, seed * 1000 + i, num_messages, done) for i in range(NUM_CLIENTS)))
    return done


async def _client(server: Serving, seed: int, num_messages: int, done: Done) -> None:
    rng, messages = random.Random(seed), Messages(seed)
    while done.num_messages < num_messages:
        url = f"ws://127.0.0.1:{server.port}/v1/stream?{messages.query()}"
        async with connect(url, proxy=None, max_queue=None) as socket:
            grammar = Grammar()
            reader = asyncio.create_task(_read(socket, grammar, done))
            await _write(socket, grammar, rng, messages, done)
            if rng.random() < 0.5:
                socket.transport.abort()  # gone, without a word
            await socket.close()
            async with asyncio.timeout(TIMEOUT_S):
                await reader
            done.num_sessions += 1
            done.closes[socket.close_code] = done.closes.get(socket.close_code, 0) + 1


async def _write(
    socket: ClientConnection, grammar: Grammar, rng: random.Random, messages: Messages, done: Done
) -> None:
    """Up to 300 messages in bursts. The polite wait after each until the server has read it."""
    is_gentle, is_polite = rng.random() < 0.3, rng.random() < 0.8
    with suppress(ConnectionClosed):
        for _ in range(rng.randrange(1, 15)):
            for _ in range(rng.randrange(1, 40)):
                await socket.send(messages.next(is_gentle))
                done.num_messages += 1
            if is_polite:
                num_pongs = grammar.num_pongs
                await socket.send('{"type": "ping"}')
                while grammar.num_pongs == num_pongs and socket.state is State.OPEN:
                    await asyncio.sleep(0.001)
            await asyncio.sleep(rng.choice([0, 0, 0.005, 0.05]))


async def _read(socket: ClientConnection, grammar: Grammar, done: Done) -> None:
    with suppress(ConnectionClosed):
        async for message in socket:
            grammar.push(message)
            done.num_events += 1


async def next_session_works(server: Serving) -> None:
    async with server.client(turn="manual") as client:
        await client.audio(pcm(1.0))
        await client.say(type="input.commit")
        await client.until("response.done")
        assert client.text() == "echo: heard 1000 ms"
    await server.until_empty()


async def short_session(server: Serving) -> None:
    """The detector's loop names the last audio it was given: here is some of known size."""
    async with server.client(turn="server_vad") as client:
        await client.audio(pcm(0.2))
        await asyncio.sleep(0.3)


async def settled(server: Serving, own_tasks: set[asyncio.Task]) -> None:
    """All of it is gone: permits, engine state, tasks, and every object that was one session's."""
    await server.until_empty()
    deadline = asyncio.get_running_loop().time() + TIMEOUT_S
    while left := _leftovers(own_tasks):
        assert asyncio.get_running_loop().time() < deadline, f"left of sessions that ended: {left}"
        await asyncio.sleep(0.2)
    assert server.service.gate.in_flight == 0


def _leftovers(own_tasks: set[asyncio.Task]) -> list[str]:
    """As texts: a list of the things themselves would keep them."""
    gc.collect()
    things = gc.get_objects()
    sessions = [thing for thing in things if isinstance(thing, Session)]
    others = [thing for thing in things if isinstance(thing, Outbox | Connection)]
    tasks = asyncio.all_tasks() - own_tasks
    return [repr(thing) for thing in (*tasks, *others, *sessions[NUM_BEATS:])]


async def test_no_message_harms_the_server(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    # Both hold a dead connection for so long, in case that its peer never reads or never speaks.
    monkeypatch.setattr(connection, "ABORT_AFTER_S", 0.5)
    monkeypatch.setattr(connection, "REQUEST_LIMIT_S", 2.0)
    caplog.set_level(logging.ERROR)
    # Without the limit of messages a second: it is an answer to a flood, which this is.
    options = {
        "max_sessions": 64,
        "aimd__initial": 64,
        "aimd__minimum": 64,
        "session__max_messages_per_s": None,
    }
    async with serving(voice=ToneVoice(), **options) as server:
        await next_session_works(server)
        await asyncio.sleep(0.5)
        own_tasks = asyncio.all_tasks()
        # The first part fills caches, which would look like a leak; the third is held against the second.
        parts = [await fuzz(server, NUM_MESSAGES // 3, SEED)]
        await settled(server, own_tasks)
        tracemalloc.start()
        try:
            held = []
            for part in (1, 2):
                parts.append(await fuzz(server, NUM_MESSAGES // 3, SEED + part))
                await short_session(server)
                await settled(server, own_tasks)
                held.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        await next_session_works(server)
    grown = held[1] - held[0]
    assert not caplog.records, [(r.name, r.getMessage(), r.exc_text) for r in caplog.records]
    for done in parts:
        print(f"\n{done}")
        assert done.num_messages >= NUM_MESSAGES // 3 and done.num_events > done.num_sessions > 0
        assert set(done.closes) - {None, 1005, 1006} <= ALLOWED_CLOSES, done.closes
    print(f"grown by {grown / 1024:.0f} KiB over the last {parts[-1].num_sessions} sessions")
    assert grown < KEPT_BYTES, f"{parts[-1].num_sessions} sessions left {grown} bytes allocated"
