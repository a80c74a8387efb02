"""Keys, origins and limits on real sockets: who is let in, and what the others are told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from websockets.asyncio.client import connect

from tests.support.serving import TIMEOUT_S, Client, Serving, serving
from tests.support.stage import pcm

WEB, PHONE, PROBE = "web-key-0123456789", "phone-key-0123456789", "probe-key-0123456789"
KEYS = f"web {WEB}, phone {PHONE} 1, probe {PROBE} 0"


@contextlib.asynccontextmanager
async def client(server: Serving, query: str = "", **connecting: Any) -> AsyncIterator[Client]:
    url = f"ws://127.0.0.1:{server.port}/v1/stream?turn=manual{query}"
    async with connect(url, proxy=None, **connecting) as socket:
        yield Client(socket)


def with_key(key: str) -> dict[str, Any]:
    return {"additional_headers": {"Authorization": f"Bearer {key}"}}


async def turn(client: Client) -> str:
    await client.audio(pcm(1.0))
    await client.say(type="input.commit")
    await client.until("response.done")
    return client.text()


async def refused(client: Client, code: str, close_code: int = 1008) -> str:
    """The one error event, then the close; the event's message."""
    closed, _ = await client.closed()
    (error,) = client.events
    assert (error["type"], error["code"], closed) == ("error", code, close_code)
    return error["message"]


async def test_a_key_is_taken_from_header_query_or_first_message():
    async with serving(auth__keys=KEYS) as server:
        async with client(server, **with_key(WEB)) as caller:
            assert await turn(caller) == "echo: heard 1000 ms"
        async with client(server, f"&key={WEB}") as caller:
            assert await turn(caller) == "echo: heard 1000 ms"
        async with client(server) as caller:
            await caller.say(type="auth", key=WEB)
            assert await turn(caller) == "echo: heard 1000 ms"
        await server.until_empty()


@pytest.mark.parametrize(
    ("query", "header", "first"),
    [
        ("", "wrong-key-0123456789", None),
        ("&key=wrong", None, None),
        (f"&key={WEB}", "wrong-key-0123456789", None),  # the header decides
        ("", None, json.dumps({"type": "auth", "key": "wrong"})),
        ("", None, json.dumps({"type": "auth", "key": "x" * 600})),
        ("", None, json.dumps({"type": "ping"})),
        ("", None, "not json"),
        ("", None, pcm(0.02)),
    ],
)
async def test_without_a_known_key_there_is_no_session(
    query: str, header: str | None, first: str | bytes | None
):
    async with serving(auth__keys=KEYS) as server:
        async with client(server, query, **(with_key(header) if header else {})) as caller:
            if first is not None:
                await caller.socket.send(first)
            await refused(caller, "unauthorized")
        assert server.service.gate.num_admitted == 0
        assert server.service.gate.refused == {"unauthorized": 1}


async def test_a_key_that_does_not_come_in_time_and_one_that_never_will():
    async with serving(auth__keys=KEYS, auth__deadline_s=0.2) as server:
        async with client(server) as mute:
            assert "first message" in await refused(mute, "unauthorized")
    async with serving(auth__keys=KEYS) as server:
        async with client(server) as caller:
            caller.socket.transport.abort()
        async with asyncio.timeout(TIMEOUT_S):
            while server.service.door.num_pending:
                await asyncio.sleep(0.01)


async def test_few_may_wait_with_their_key():
    async with serving(auth__keys=KEYS, auth__max_pending=1) as server, client(server) as slow:
        async with asyncio.timeout(TIMEOUT_S):
            while server.service.door.num_pending < 1:
                await asyncio.sleep(0.01)
        async with client(server) as other:
            await refused(other, "too_many_pending", 1013)
        async with client(server, **with_key(WEB)) as caller:  # who brings it at once does not wait
            assert await turn(caller) == "echo: heard 1000 ms"
        await slow.say(type="auth", key=WEB)
        assert await turn(slow) == "echo: heard 1000 ms"


async def test_a_key_has_its_number_of_sessions():
    async with serving(auth__keys=KEYS) as server:
        async with client(server, **with_key(PHONE)) as first:
            assert await turn(first) == "echo: heard 1000 ms"
            async with client(server, **with_key(PHONE)) as second:
                assert "phone" in await refused(second, "key_limit", 1013)
                assert second.events[0]["retry_after_ms"] > 0
            async with client(server, **with_key(WEB)) as other:
                assert await turn(other) == "echo: heard 1000 ms"
        await server.until_empty()
        async with client(server, **with_key(PHONE)) as again:
            assert await turn(again) == "echo: heard 1000 ms"
        async with client(server, **with_key(PROBE)) as probe:
            await refused(probe, "key_limit", 1013)


async def test_http_needs_the_key_too_but_health_does_not():
    async with serving(auth__keys=KEYS) as server:
        base = f"http://127.0.0.1:{server.port}"
        async with httpx.AsyncClient(base_url=base, trust_env=False) as http:
            assert (await http.get("/health")).status_code == 200
            for path in ("/capacity", "/capacity?require=1", "/capacity?key=wrong"):
                answer = await http.get(path)
                assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
                assert "active" not in answer.text
            header = {"Authorization": f"Bearer {PROBE}"}
            assert (await http.get("/capacity", headers=header)).json()["active"] == 0
            assert (await http.get(f"/capacity?key={PROBE}")).status_code == 200


async def test_an_open_server_lets_everybody_in_who_also_sends_a_key():
    async with serving() as server, client(server, **with_key("whatever")) as caller:
        await caller.say(type="auth", key="whatever")
        assert await turn(caller) == "echo: heard 1000 ms"
        assert "error" not in caller.types()


async def test_pages_of_other_origins_are_refused_unless_listed():
    async with serving(auth__origins="https://friend.example") as server:
        async with client(server, origin="https://evil.example") as page:
            await refused(page, "origin_not_allowed")
        for origin in ("https://friend.example", f"http://127.0.0.1:{server.port}"):
            async with client(server, origin=origin) as page:
                assert await turn(page) == "echo: heard 1000 ms"


async def test_too_many_messages_close_their_own_session_only():
    async with serving(session__max_messages_per_s=10) as server:
        async with client(server) as other, client(server) as fast:
            with contextlib.suppress(Exception):
                for _ in range(60):
                    await fast.audio(b"")
            code, _ = await fast.closed()
            assert code == 1008 and fast.events[-1]["code"] == "too_fast"
            assert await turn(other) == "echo: heard 1000 ms"
        await server.until_empty()


async def test_connections_beyond_the_limit_are_closed_unheard():
    async with serving(max_connections=2) as server, client(server) as first, client(server) as second:
        await first.next()
        await second.next()
        with pytest.raises(httpx.TransportError):
            await server.get("/health")
        await second.socket.close()
        async with asyncio.timeout(TIMEOUT_S):
            while len(server.server.server_state.connections) > 1:
                await asyncio.sleep(0.01)
        assert (await server.get("/health")).status_code == 200
        assert await turn(first) == "echo: heard 1000 ms"


async def test_a_connection_without_a_request_is_closed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("app.connection.REQUEST_LIMIT_S", 1.0)
    async with serving() as server, client(server) as caller:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n")  # and never the empty line
        async with asyncio.timeout(TIMEOUT_S):
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()
        assert await turn(caller) == "echo: heard 1000 ms"  # older than the limit, and alive


async def test_tls(tmp_path: Path):
    authority = trustme.CA()
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    async with serving(tls__cert=str(tmp_path / "server.pem")) as server:
        url = f"wss://localhost:{server.port}/v1/stream?turn=manual"
        async with connect(url, ssl=trust, proxy=None, host="127.0.0.1") as socket:
            assert await turn(Client(socket)) == "echo: heard 1000 ms"
        async with httpx.AsyncClient(verify=trust, trust_env=False) as http:
            assert (await http.get(f"https://localhost:{server.port}/health")).status_code == 200


async def test_logs_hold_neither_words_nor_keys(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    # The one logger that `run` quiets, see tests/app/test_process.py for the whole process.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    logging.getLogger("websockets").setLevel(logging.WARNING)  # the test's own client
    async with serving(auth__keys=KEYS) as server:
        async with client(server, f"&key={WEB}") as caller:
            await caller.say(type="session.update", instructions="tell nobody of the blue elephant")
            await caller.say(type="nonsense", words="blue elephant")
            assert await turn(caller) == "echo: heard 1000 ms"
            session_id = caller.events[0]["id"]
        async with client(server, "&key=wrong-key-0123456789"):
            pass
    assert f"session {session_id} opened by web" in caplog.text
    for secret in (WEB, "wrong-key", "elephant", "heard 1000"):
        assert secret not in caplog.text
