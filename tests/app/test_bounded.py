"""What the server holds depends neither on a session's age nor on how many sessions there were.

Counted in the allocator's blocks (`sys.getallocatedblocks`), of which each Python object takes one or more:
a turn that left an object, or a session that left a few, would be over the limits set here (CPython's own
free lists take about one a session until they are full). The null engine; the bounds of the real one are
tested in tests/engine/vllm/ and measured by bench/endless_day.py.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from engine.null import DEFAULT_LIMITS, NullCore, NullEngine
from tests.support.serving import Serving, serving
from tests.support.stage import pcm
from tests.support.voices import ToneVoice

FEW = 120  # rounds that fill what is bounded
TURNS, SESSIONS = 1500, 400  # rounds that show whether anything else grows
OPTIONS: dict[str, Any] = {"session__max_messages_per_s": 100_000}


def endless() -> NullEngine:
    return NullEngine(replace(DEFAULT_LIMITS, max_session_tokens=None))


@pytest.fixture(autouse=True)
def short_memories(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of the last few thousand is full after FEW."""
    monkeypatch.setattr(NullCore, "ENDED_KEPT", 16)


async def blocks_per_round(one_round: Callable[[], Awaitable[None]], many: int) -> float:
    for _ in range(FEW):
        await one_round()
    before = num_blocks()
    for _ in range(many):
        await one_round()
    return (num_blocks() - before) / many


def num_blocks() -> int:
    gc.collect()
    return sys.getallocatedblocks()


async def series(server: Serving) -> set[str]:
    """Names and labels of all that /metrics shows."""
    lines = (await server.get("/metrics")).text.splitlines()
    return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}


async def test_a_session_of_many_turns_holds_no_more_than_one_of_few():
    async with (
        serving(make_engine=endless, **OPTIONS) as server,
        server.client(turn="manual", max_tokens=4) as client,
    ):

        async def one_round() -> None:
            await client.forgetful_turn(pcm(0.02))
            await client.say(type="session.update", instructions="be brief", max_tokens=4)
            await client.say(type="response.cancel")

        assert await blocks_per_round(one_round, TURNS) < 0.5
        before = await series(server)
        await client.forgetful_turn(pcm(0.02))
        assert await series(server) == before


async def test_a_session_that_speaks_many_answers_holds_no_more_than_one_of_few():
    async with serving(voice=ToneVoice(), make_engine=endless, **OPTIONS) as server:
        async with server.client(turn="manual", max_tokens=4, voice="on") as client:
            assert await blocks_per_round(lambda: client.forgetful_turn(pcm(0.02)), TURNS) < 0.5


async def test_many_sessions_leave_no_more_than_few():
    async with serving(make_engine=endless, **OPTIONS) as server:
        names: list[set[str]] = []

        async def one_round() -> None:
            async with server.client(turn="manual", max_tokens=4) as client:
                await client.forgetful_turn(pcm(0.02))
            await server.until_empty()

        await one_round()
        names.append(await series(server))
        assert await blocks_per_round(one_round, SESSIONS) < 3.0
        names.append(await series(server))
        assert names[0] == names[1]  # no label names a session


async def test_many_refused_callers_leave_no_more_than_few():
    async with serving(max_sessions=1) as server, server.client(turn="manual") as first:
        await first.until("session.created")

        async def one_round() -> None:
            async with server.client() as client:
                assert (await client.closed())[0] == 1013

        assert await blocks_per_round(one_round, SESSIONS) < 3.0  # the gate remembers the last 1,024 refusals


async def test_commits_faster_than_they_are_answered_do_not_pile_up():
    """The client asks for thousands of answers; what waits of them stays bounded (engine/audio/queue.py)."""
    async with serving(make_engine=endless, **OPTIONS) as server:
        async with server.client(turn="manual", max_tokens=1) as client:
            await client.until("session.created")
            (session,) = server.service.conductor.scheduler
            for _ in range(3000):
                await client.audio(b"\0\0" * 40)
                await client.say(type="input.commit")
            await client.say(type="ping")
            await client.until("pong")
            assert len(session._queue._turns) <= 66
