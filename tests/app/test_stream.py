"""`/v1/stream` on real uvicorn and real sockets, with the null engine: every answer a client can get."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from dataclasses import replace
from typing import Any, cast

import pytest
from websockets.exceptions import ConnectionClosed

from app.outbox import Outbox
from app.stream import _write
from engine.conductor import REBUILD_LIMIT, Phase
from engine.engine import EngineError, OnFailure, OnResults
from engine.events import Pong
from engine.null import DEFAULT_LIMITS, NullEngine
from tests.support.serving import TIMEOUT_S, Client, Serving, serving
from tests.support.stage import pcm


async def turn(client: Client, seconds: float = 1.0) -> str:
    """One manual turn; the new text of the answer."""
    before = len(client.text())
    await client.audio(pcm(seconds))
    await client.say(type="input.commit")
    await client.until("response.done")
    return client.text()[before:]


async def still_works(server: Serving) -> None:
    """The next caller is served, and afterwards nothing is left of anybody."""
    async with server.client(turn="manual") as client:
        assert await turn(client) == "echo: heard 1000 ms"
    await server.until_empty()


async def test_a_session_says_what_it_is_and_answers():
    async with serving() as server, server.client(turn="manual") as client:
        created = await client.next()
        assert created["type"] == "session.created"
        assert (created["model"], created["sample_rate"], created["turn"]) == ("null", 16000, "manual")
        assert created["budget_ms"] == 2000 and created["limits"]["max_backlog_ms"] == 4000
        assert await turn(client) == "echo: heard 1000 ms"
        assert await turn(client, 2.0) == "echo: heard 2000 ms"
        ticks = [e for e in client.events if e["type"] == "tick"]
        assert all(t.keys() >= {"seq", "audio_ms", "lateness_ms", "tokens", "kv_tokens"} for t in ticks)


async def test_audio_at_48_khz_in_odd_pieces_is_the_same_audio():
    data = pcm(1.0, 48_000)
    async with serving() as server, server.client(turn="manual", sample_rate=48_000) as client:
        for start in range(0, len(data), 777):
            await client.audio(data[start : start + 777])
        await client.audio(b"")
        await client.say(type="input.commit")
        await client.until("response.done")
        assert client.text() == "echo: heard 1000 ms"


@pytest.mark.parametrize("broken", ["on_audio", "on_commit"])
async def test_a_fault_in_one_session_ends_it_and_no_other(broken: str, monkeypatch: pytest.MonkeyPatch):
    async with serving() as server, server.client(turn="manual") as good:
        await good.next()
        async with server.client(turn="manual") as bad:
            created = await bad.next()
            session = server.service.conductor.scheduler.get(created["id"])
            monkeypatch.setattr(session, broken, lambda *args: 1 // 0)
            await bad.audio(pcm(0.1))
            await bad.say(type="input.commit")
            assert (await bad.closed())[0] == 1011
            assert bad.events[-1]["code"] == "session_failed"
        assert await turn(good) == "echo: heard 1000 ms"
        assert server.service.conductor.tally().faults == 1


async def test_one_too_many_is_refused_at_once_and_the_others_go_on():
    async with (
        serving(max_sessions=2) as server,
        server.client(turn="manual") as first,
        server.client(turn="manual") as second,
    ):
        await first.next()
        await second.next()
        async with server.client() as third:
            code, reason = await third.closed()
            (error,) = third.events
        assert (error["type"], error["code"], error["status"]) == ("error", "at_capacity", 503)
        assert error["retry_after_ms"] > 0
        assert code == 1013 and "places" in reason
        health, capacity = await server.get("/health"), await server.get("/capacity")
        assert health.status_code == 200  # full is not down
        assert (capacity.json()["active"], capacity.json()["free"]) == (2, 0)
        assert capacity.json()["refused"] == {"load": 1}
        required = await server.get("/capacity?require=1")
        assert required.status_code == 503 and int(required.headers["retry-after"]) >= 1
        assert await turn(first) == await turn(second) == "echo: heard 1000 ms"


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"sample_rate": 4000}, "8000 to 48000"),
        ({"sample_rate": "fast"}, "8000 to 48000"),
        ({"max_tokens": 0}, "1 to"),
        ({"turn": "sometimes"}, "server_vad"),
    ],
)
async def test_a_bad_query_is_answered_with_what_to_change(query: dict, words: str):
    async with serving() as server:
        async with server.client(**query) as client:
            code, _ = await client.closed()
        assert code == 1003 and words in client.events[-1]["message"]
        await still_works(server)


async def test_text_that_is_not_json_closes_with_1007():
    async with serving() as server:
        async with server.client() as client:
            await client.socket.send("{not json")
            code, _ = await client.closed()
        assert code == 1007 and client.events[-1]["code"] == "bad_json"
        await still_works(server)


@pytest.mark.parametrize(
    "message",
    [
        {"type": "session.destroy"},
        {"no": "type"},
        {"type": "session.update", "max_tokens": -1},
        {"type": "session.update", "turn": "sometimes"},
        {"type": "input.commit", "extra": 1},
        [],
        7,
    ],
)
async def test_json_that_is_not_understood_is_answered_and_the_session_goes_on(message):
    async with serving() as server, server.client(turn="manual") as client:
        await client.socket.send(json.dumps(message))
        error = await client.until("error")
        assert (error["code"], error["status"]) == ("not_understood", 400)
        assert await turn(client) == "echo: heard 1000 ms"


async def test_a_client_that_is_never_understood_is_closed():
    async with serving() as server:
        async with server.client() as client:
            for _ in range(25):
                await client.say(type="nonsense")
            code, _ = await client.closed()
        assert code == 1003
        await still_works(server)


@pytest.mark.parametrize("size", [2048, 10_000])  # over our limit; over what uvicorn takes
async def test_a_huge_message_closes_with_1009(size: int):
    async with serving(session__max_message_bytes=1024) as server:
        async with server.client(turn="manual") as client:
            await client.audio(bytes(size))
            code, _ = await client.closed()
            assert code == 1009
        async with server.client(turn="manual") as client:
            for _ in range(40):
                await client.audio(pcm(0.025))
            await client.say(type="input.commit")
            await client.until("response.done")
        await server.until_empty()


async def test_too_fast_audio_is_bounded_and_the_client_is_told():
    async with serving() as server, server.client(turn="manual") as client:
        for _ in range(10):
            await client.audio(pcm(1.0))
        warning = await client.until("warning")
        assert warning["code"] == "audio_dropped"
        await client.say(type="input.commit")
        await client.until("response.done")
        assert client.text() == "echo: heard 4000 ms"


async def test_update_changes_what_it_names_and_cancel_and_ping_are_answered():
    async with serving() as server, server.client(turn="server_vad") as client:
        await client.say(type="session.update", turn="manual", instructions="be terse", max_tokens=5)
        updated = await client.until("session.updated")
        assert (updated["turn"], updated["instructions"], updated["max_tokens"]) == ("manual", "be terse", 5)
        assert await turn(client) == "echo:"
        assert client.events[-1]["reason"] == "length" or client.events[-2]["reason"] == "length"
        await client.say(type="response.cancel")
        await client.say(type="ping")
        await client.until("pong")


async def test_cancel_stops_a_long_answer():
    slow = lambda: NullEngine(step_s=0.05, tokens_per_step=1)  # noqa: E731
    async with serving(make_engine=slow) as server, server.client(turn="manual") as client:
        await client.audio(pcm(1.0))
        await client.say(type="input.commit")
        await client.until("response.text.delta")
        await client.say(type="response.cancel")
        done = await client.until("response.done")
        assert done["reason"] == "cancelled" and done["tokens"] < len("echo: heard 1000 ms")
        assert await turn(client) == "echo: heard 1000 ms"


@pytest.mark.parametrize("moment", ["at once", "listening", "answering", "after"])
async def test_an_abrupt_end_in_any_state_frees_everything(moment: str):
    slow = lambda: NullEngine(step_s=0.05, tokens_per_step=1)  # noqa: E731
    async with serving(make_engine=slow) as server:
        async with server.client(turn="manual") as client:
            if moment != "at once":
                await client.audio(pcm(2.0))
            if moment in ("answering", "after"):
                await client.say(type="input.commit")
                await client.until("response.done" if moment == "after" else "response.text.delta")
            client.socket.transport.abort()
        await server.until_empty()
        await still_works(server)


async def test_a_client_that_does_not_read_costs_its_own_session_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("app.stream.SEND_LIMIT_S", 1.0)
    async with (
        serving(session__max_messages_per_s=None) as server,
        server.client(turn="manual") as other,
        server.client(turn="manual") as deaf,
    ):
        await deaf.next()
        deaf.socket.transport.pause_reading()
        update = json.dumps({"type": "session.update", "instructions": "x" * 4000})  # answered with as much
        with contextlib.suppress(ConnectionClosed):
            async with asyncio.timeout(TIMEOUT_S):
                while server.service.gate.in_flight == 2:
                    await deaf.socket.send(update)
                    await asyncio.sleep(0)
        assert server.service.gate.in_flight == 1
        assert await turn(other) == "echo: heard 1000 ms"
        deaf.socket.transport.abort()


async def test_a_connection_that_fails_while_something_is_written_is_an_ordinary_end():
    class Failed:
        async def send_text(self, text: str) -> None:
            raise RuntimeError("Unexpected ASGI message 'websocket.send', after sending 'websocket.close'.")

    outbox = Outbox()
    outbox.put(Pong())
    async with asyncio.timeout(TIMEOUT_S):
        await _write(cast(Any, Failed()), outbox)


async def test_an_engine_that_dies_ends_its_sessions_with_1011_and_is_rebuilt():
    engines: list[NullEngine] = []

    def make_engine() -> NullEngine:
        engines.append(NullEngine())
        return engines[-1]

    async with serving(make_engine=make_engine) as server:
        async with server.client(turn="manual") as client:
            await client.next()
            engines[0].break_down("a bit flipped")
            code, _ = await client.closed()
            assert code == 1011 and client.events[-1]["code"] == "engine_failed"
            assert client.events[-1]["retry_after_ms"] > 0
        await server.until_ready()
        assert len(engines) == 2
        await still_works(server)


async def test_an_engine_that_keeps_dying_fails_the_server_so_that_its_supervisor_restarts_it():
    engines: list[NullEngine] = []

    def make_engine() -> NullEngine:
        engines.append(NullEngine())
        return engines[-1]

    async with serving(make_engine=make_engine) as server:
        conductor = server.service.conductor
        for deaths in range(1, REBUILD_LIMIT + 2):
            engines[-1].break_down("worn out")
            async with asyncio.timeout(TIMEOUT_S):
                while len(engines) == deaths and not server.server.should_exit:
                    await asyncio.sleep(0.01)
                while conductor.phase is Phase.STARTING:
                    await asyncio.sleep(0.01)
        assert conductor.phase is Phase.FAILED and server.server.should_exit
        assert len(engines) == REBUILD_LIMIT + 1


async def test_a_server_whose_engine_does_not_start_fails():
    class Broken(NullEngine):
        def start(self, on_results: OnResults, on_failure: OnFailure) -> None:
            raise EngineError("no such device")

    async with serving(make_engine=Broken, wait=False) as server:
        async with asyncio.timeout(TIMEOUT_S):
            while not server.server.should_exit:
                await asyncio.sleep(0.01)
        assert server.service.conductor.phase is Phase.FAILED


async def test_until_the_engine_has_started_callers_are_refused_and_health_says_starting():
    may_start = threading.Event()

    class SlowStart(NullEngine):
        def start(self, on_results: OnResults, on_failure: OnFailure) -> None:
            may_start.wait(TIMEOUT_S)
            super().start(on_results, on_failure)

    async with serving(make_engine=SlowStart, wait=False) as server:
        health = await server.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "starting")
        assert (await server.get("/capacity")).json()["kv_cache"] is None
        async with server.client() as early:
            code, _ = await early.closed()
        assert code == 1013 and early.events[0]["code"] == "starting"
        may_start.set()
        await server.until_ready()
        await still_works(server)


async def test_draining_lets_a_session_finish_and_refuses_new_ones():
    async with serving() as server, server.client(turn="manual") as client:
        await client.next()
        drain = asyncio.create_task(server.service.conductor.drain(deadline_s=2.0))
        await asyncio.sleep(0)
        health = await server.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        async with server.client() as late:
            code, _ = await late.closed()
            assert code == 1001 and late.events[0]["code"] == "draining"
        warning = await client.until("warning")
        assert warning["code"] == "draining" and "2 s" in warning["message"]
        assert await turn(client) == "echo: heard 1000 ms"
        code, _ = await client.closed()
        assert code == 1001
        await drain


async def test_kv_blocks_bound_admission():
    tight = replace(DEFAULT_LIMITS, num_kv_blocks=2 * DEFAULT_LIMITS.blocks_per_session)
    async with serving(make_engine=lambda: NullEngine(tight)) as server:
        async with server.client() as a, server.client() as b, server.client() as c:
            await a.next()
            await b.next()
            code, _ = await c.closed()
        assert code == 1013 and (await server.get("/capacity")).json()["refused"] == {"kv_cache": 1}
