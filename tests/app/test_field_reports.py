"""Faults that people reported of comparable servers, where no other test of ours would show them.

tests/FIELD_REPORTS.md is the list of all of them. The null engine, real sockets.
"""

from __future__ import annotations

import asyncio
import threading

import pytest
from pydantic import BaseModel

from app.options import load
from app.server import uvicorn_config
from app.settings import resolve
from engine import events
from engine.models.null import NullFamily
from engine.types import Hearing, Intake
from tests.support.serving import Client, serving
from tests.support.stage import pcm
from tests.support.voices import ToneVoice


async def turn(client: Client) -> None:
    await client.audio(pcm(0.5))
    await client.say(type="input.commit")
    await client.until("response.done")


async def test_every_event_has_every_field_of_its_type():
    """A strict client died on a missing field: absent values are nulls."""
    fields = {
        cls.model_fields["type"].default: set(cls.model_fields)
        for cls in vars(events).values()
        if isinstance(cls, type) and issubclass(cls, BaseModel) and "type" in cls.model_fields
    }
    async with serving(voice=ToneVoice()) as server, server.client(turn="manual", voice="on") as client:
        await turn(client)
        await client.say(type="session.update", instructions="be kind")
        await client.say(type="session.update", turn="sideways")
        await client.say(type="response.cancel")
        await client.say(type="ping")
        await client.until("pong")
    assert len({event["type"] for event in client.events}) >= 9
    for event in client.events:
        assert set(event) == fields[event["type"]], event


async def test_a_turn_costs_as_many_bytes_after_hundreds_of_turns_as_at_first():
    """A server re-sent the whole session with every chunk: here events carry what is new."""
    sizes: list[int] = []
    async with serving(session__max_messages_per_s=100_000) as server:
        async with server.client(turn="manual", max_tokens=8) as client:
            for _ in range(200):
                client.events.clear()
                await turn(client)
                sizes.append(sum(len(str(event)) for event in client.events if event["type"] != "tick"))
    first, last = sizes[10:30], sizes[-20:]
    assert max(last) <= max(first) + 20  # an answer's number has more digits


class StuckFamily(NullFamily):
    """Hears nothing until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.is_stuck = threading.Event()

    def hear(self, batch: list[Hearing]) -> list[Intake]:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.is_stuck.set()
        assert self.go_on.wait(60)
        return super().hear(batch)


async def test_a_hearing_that_takes_long_holds_up_neither_sockets_nor_callers():
    """One lock, or one thread, for ingest, detection and recognition stopped everybody."""
    family = StuckFamily()
    try:
        async with serving(family) as server, server.client(turn="manual") as client:
            await client.audio(pcm(0.5))
            await client.say(type="input.commit")
            await asyncio.to_thread(family.is_stuck.wait, 60)
            await client.say(type="ping")
            await client.until("pong")
            await (await client.socket.ping())  # the protocol's own
            async with server.client(turn="server_vad") as other:
                await other.until("session.created")
                await other.audio(pcm(0.5))
                await other.say(type="ping")
                await other.until("pong")
            assert (await server.get("/health")).status_code == 200
            family.go_on.set()
            await client.until("response.done")
    finally:
        family.go_on.set()


def test_a_loop_that_is_busy_for_seconds_does_not_cost_healthy_sessions():
    """Pongs that came late closed sessions with 1011: ours may be a minute late, longer than any pause."""
    config = uvicorn_config(None, resolve(load({("model",): "null"})))  # pyright: ignore[reportArgumentType]
    assert config.ws_ping_timeout is not None and config.ws_ping_timeout >= 60


async def test_the_first_caller_pays_for_nothing_that_is_lazy():
    """The first caller paid 28 s of compilation: here a synthetic session goes through everything before."""
    rehearsed: list[bool] = []

    async def rehearsal(conductor, config) -> None:
        rehearsed.append(conductor.engine is not None)

    async with serving(rehearsal=rehearsal) as server:
        assert rehearsed == [True]
        assert (await server.get("/health")).json()["status"] == "ready"


@pytest.mark.parametrize("path", ["/v1/realtime", "/v1/other"])
async def test_an_endpoint_that_is_not_there_is_refused_before_the_handshake(path: str):
    from websockets.asyncio.client import connect
    from websockets.exceptions import InvalidStatus

    async with serving() as server:
        with pytest.raises(InvalidStatus) as refused:
            async with connect(f"ws://127.0.0.1:{server.port}{path}", proxy=None):
                pass
        assert refused.value.response.status_code in (403, 404)
