"""The real server on a real port, in the test's event loop; and a client that keeps what it is told."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from app.options import load
from app.server import make_app, uvicorn_config
from app.service import Service, build
from app.settings import Settings, resolve
from engine.audio.speech import SpeechDetector
from engine.conductor import Conductor, Phase
from engine.config import SessionConfig
from engine.engine import Engine
from engine.models import load_vad_file
from engine.models.family import Family
from engine.models.null import NullFamily
from engine.null import NullEngine
from engine.voice.voice import Voice

TIMEOUT_S = 60.0  # of a test's waits: generous, because the machine is noisy


@dataclass
class Client:
    """One session as an app would hold it."""

    socket: ClientConnection
    events: list[dict[str, Any]] = field(default_factory=list)
    sound: bytes = b""  # of all answers

    async def say(self, **message: Any) -> None:
        await self.socket.send(json.dumps(message))

    async def audio(self, data: bytes) -> None:
        await self.socket.send(data)

    async def next(self) -> dict[str, Any]:
        async with asyncio.timeout(TIMEOUT_S):
            event = json.loads(await self.socket.recv())
            if event["type"] == "response.audio":
                pcm = await self.socket.recv()
                assert isinstance(pcm, bytes) and len(pcm) == event["num_bytes"]
                self.sound += pcm
        self.events.append(event)
        return event

    async def until(self, kind: str) -> dict[str, Any]:
        """Read until an event of this type."""
        while (event := await self.next())["type"] != kind:
            pass
        return event

    async def closed(self) -> tuple[int, str]:
        """Read to the end; the close frame's code and reason."""
        with contextlib.suppress(ConnectionClosed):
            while True:
                await self.next()
        assert self.socket.close_code is not None
        return self.socket.close_code, self.socket.close_reason or ""

    async def forgetful_turn(self, audio: bytes) -> None:
        """A manual turn and its answer, of which nothing is kept: for clients that talk for days."""
        self.events.clear()
        self.sound = b""
        await self.audio(audio)
        await self.say(type="input.commit")
        await self.until("response.done")

    def text(self) -> str:
        return "".join(e["delta"] for e in self.events if e["type"] == "response.text.delta")

    def types(self) -> list[str]:
        return [e["type"] for e in self.events]


@dataclass
class Serving:
    service: Service
    port: int
    server: uvicorn.Server

    @contextlib.asynccontextmanager
    async def client(self, **query: Any) -> AsyncIterator[Client]:
        text = "&".join(f"{name}={value}" for name, value in query.items())
        async with connect(f"ws://127.0.0.1:{self.port}/v1/stream?{text}", proxy=None) as socket:
            yield Client(socket)

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", trust_env=False) as http:
            return await http.get(path)

    async def until_ready(self) -> None:
        async with asyncio.timeout(3 * TIMEOUT_S):
            while self.service.conductor.phase is Phase.STARTING:
                await asyncio.sleep(0.01)
        assert self.service.conductor.phase is Phase.READY

    async def until_empty(self) -> None:
        """Wait until nothing is left of any session: permits, sessions, engine state."""
        conductor = self.service.conductor
        async with asyncio.timeout(TIMEOUT_S):
            while (
                self.service.gate.in_flight
                or len(conductor.scheduler)
                or (conductor.engine and conductor.engine.stats().num_sessions)
                or (conductor.engine and conductor.engine.stats().kv_blocks_used)
            ):
                await asyncio.sleep(0.01)


async def no_rehearsal(conductor: Conductor, config: SessionConfig) -> None:
    pass


@contextlib.asynccontextmanager
async def serving(
    family: Family | None = None,
    make_engine: Callable[[], Engine] = NullEngine,
    rehearsal: Callable[[Conductor, SessionConfig], Any] = no_rehearsal,
    wait: bool = True,
    voice: Voice | None = None,
    **options: Any,
) -> AsyncIterator[Serving]:
    """Options by their path with a double underscore: `session__max_message_bytes=1024`."""
    settings: Settings = resolve(
        load({("model",): "null", ("port",): 0} | {tuple(k.split("__")): v for k, v in options.items()})
    )
    detector = SpeechDetector(load_vad_file(settings.cache_dir))
    app = make_app(
        lambda: build(settings, family or NullFamily(), make_engine, detector, voice),
        on_failure=lambda: setattr(server, "should_exit", True),
        rehearsal=rehearsal,
    )
    server = uvicorn.Server(uvicorn_config(app, settings))
    task = asyncio.create_task(server._serve())
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while not server.started:
                if task.done():
                    task.result()
                await asyncio.sleep(0.01)
        ports = [socket.getsockname()[1] for s in server.servers for socket in s.sockets]
        running = Serving(app.state.service, ports[0] if ports else 0, server)  # 0: it has stopped already
        if wait:
            await running.until_ready()
        yield running
    finally:
        server.should_exit = True
        await task
