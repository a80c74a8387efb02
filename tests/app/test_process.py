"""The command as a supervisor runs it: signals, exit statuses, and what it writes to its log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from websockets.asyncio.client import connect

from app.settings import Settings
from tests.support.serving import TIMEOUT_S, Client
from tests.support.stage import pcm

KEY = "process-key-0123456789"


@dataclass
class Server:
    process: asyncio.subprocess.Process
    port: int

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        url = f"ws://127.0.0.1:{self.port}/v1/stream?turn=manual&key={KEY}"
        async with connect(url, proxy=None) as connection:
            yield Client(connection)

    async def health(self) -> tuple[int, str]:
        async with httpx.AsyncClient(trust_env=False) as http:
            answer = await http.get(f"http://127.0.0.1:{self.port}/health")
        return answer.status_code, answer.json()["status"]

    async def until_health(self, status: int, phase: str) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                with contextlib.suppress(httpx.TransportError):
                    if await self.health() == (status, phase):
                        return
                await asyncio.sleep(0.05)

    async def exit_status(self) -> int:
        async with asyncio.timeout(TIMEOUT_S):
            return await self.process.wait()


def _heed_interrupts() -> None:
    """A shell's background jobs ignore SIGINT, and so would a server that is started from one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.asynccontextmanager
async def running(tmp_path: Path, *arguments: str) -> AsyncIterator[Server]:
    """`metronome serve` as a process of its own, ready; its output collects in `log`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path / "log"
    cache = Settings.model_fields["cache_dir"].default.expanduser()
    command = f"serve --model null --port {port} --cache-dir {cache} --log-level debug".split()
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "from app.cli import main; main()", *command, *arguments,
            stdout=out, stderr=out, env=os.environ | {"METRONOME_AUTH_KEYS": f"web {KEY}"},
            preexec_fn=_heed_interrupts,
        )  # fmt: skip
    try:
        server = Server(process, port)
        await server.until_health(200, "ready")
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_a_signal_lets_sessions_finish_and_ends_with_status_0(tmp_path: Path):
    async with running(tmp_path, "--drain-s", "60") as server:
        async with server.client() as client:
            await client.next()
            await client.say(type="session.update", instructions="of the blue elephant")
            server.process.send_signal(signal.SIGTERM)
            await server.until_health(503, "draining")
            async with server.client() as late:
                code, _ = await late.closed()
                assert code == 1001 and late.events[0]["code"] == "draining"
            await client.audio(pcm(1.0))
            await client.say(type="input.commit")
            await client.until("response.done")
            assert client.text() == "echo: heard 1000 ms"
        assert await server.exit_status() == 0
    log = (tmp_path / "log").read_text()
    assert f"session {client.events[0]['id']} opened by web" in log and "draining 1 sessions" in log
    assert "Traceback" not in log
    for secret in (KEY, "elephant", "heard 1000"):  # at debug level
        assert secret not in log


async def test_the_log_as_json_is_one_object_a_line(tmp_path: Path):
    async with running(tmp_path, "--drain-s", "0", "--log-format", "json") as server:
        async with server.client() as client:
            await client.next()
        server.process.send_signal(signal.SIGTERM)
        assert await server.exit_status() == 0
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines() if line[0] == "{"]
    (opened,) = [line for line in lines if "opened" in line["message"]]
    assert (opened["session"], opened["key"]) == (client.events[0]["id"], "web")
    assert (opened["level"], opened["logger"]) == ("INFO", "app.stream") and opened["timestamp"]


async def test_at_the_deadline_sessions_are_closed(tmp_path: Path):
    async with running(tmp_path, "--drain-s", "0.1") as server:
        async with server.client() as client:
            await client.next()
            server.process.send_signal(signal.SIGINT)
            code, _ = await client.closed()
            assert code == 1001 and client.events[-1]["code"] == "draining"
        assert await server.exit_status() == 0


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_does_not_wait_for_sessions(tmp_path: Path, second: signal.Signals):
    async with running(tmp_path, "--drain-s", "3600") as server, server.client() as client:
        await client.next()
        server.process.send_signal(signal.SIGTERM)
        await server.until_health(503, "draining")
        server.process.send_signal(second)
        assert await server.exit_status() != 0
