"""The proxy recipes, run by the real proxies: TLS outside, a session inside, and no key in a log."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest
import trustme
from websockets.asyncio.client import connect
from websockets.typing import Origin

from app.options import load
from app.server import make_app, uvicorn_config
from app.settings import resolve
from tests.support.serving import TIMEOUT_S, Client, serving
from tests.support.stage import pcm

RECIPES = Path(__file__).parents[2] / "docker/proxy"
KEY = "web-key-0123456789"

MakeCommand = Callable[[Path, int, int], list[str]]
"""A proxy's command for a folder of its own, its port and the server's."""


def nginx(folder: Path, port: int, upstream: int) -> list[str]:
    recipe = (RECIPES / "nginx.conf").read_text()
    for old, new in (
        ("127.0.0.1:8000", f"127.0.0.1:{upstream}"),
        ("443 ssl", f"127.0.0.1:{port} ssl"),
        ("/etc/letsencrypt/live/talk.example.com/fullchain.pem", str(folder / "cert.pem")),
        ("/etc/letsencrypt/live/talk.example.com/privkey.pem", str(folder / "key.pem")),
        ("/var/log/nginx/metronome.log", str(folder / "access.log")),
    ):
        assert old in recipe
        recipe = recipe.replace(old, new)
    temporary = "".join(
        f"{kind}_temp_path {folder / kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {folder / 'pid'}; events {{}} http {{ {temporary}\n{recipe}\n}}"
    )
    return ["nginx", "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]


def caddy(folder: Path, port: int, upstream: int) -> list[str]:
    recipe = (RECIPES / "Caddyfile").read_text()
    assert "talk.example.com {" in recipe and "127.0.0.1:8000" in recipe
    recipe = recipe.replace("127.0.0.1:8000", f"127.0.0.1:{upstream}").replace(
        "talk.example.com {",
        "{\n\tadmin off\n\tauto_https disable_redirects\n\tskip_install_trust\n}\n"
        f"https://localhost:{port} {{\n\ttls {folder / 'cert.pem'} {folder / 'key.pem'}",
    )
    (folder / "Caddyfile").write_text(recipe)
    return ["caddy", "run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]


@contextlib.asynccontextmanager
async def proxy(command: list[str], folder: Path, port: int) -> AsyncIterator[None]:
    with (folder / "out.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=log, stderr=log, env={"HOME": str(folder), "PATH": "/usr/sbin:/usr/bin:/bin"}
        )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                with contextlib.suppress(OSError):
                    (await asyncio.open_connection("127.0.0.1", port))[1].close()
                    break
                assert process.returncode is None, (folder / "out.log").read_text()
                await asyncio.sleep(0.05)
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def certify(folder: Path) -> ssl.SSLContext:
    """A certificate for localhost, and a client's trust in it."""
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost")
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    return trust


def logs(folder: Path) -> str:
    return "".join(path.read_text() for path in folder.glob("*.log"))


@contextlib.asynccontextmanager
async def page(base: str, trust: ssl.SSLContext, origin: str) -> AsyncIterator[Client]:
    """A session as a browser's page opens it, with its key in the query."""
    url = f"wss://{base}/v1/stream?turn=manual&key={KEY}"
    async with connect(url, ssl=trust, origin=Origin(origin), proxy=None, host="127.0.0.1") as connection:
        yield Client(connection)


@pytest.mark.parametrize("make", [nginx, caddy])
async def test_a_session_through_the_proxy(make: MakeCommand, tmp_path: Path):
    if shutil.which(make.__name__) is None:
        pytest.skip(f"{make.__name__} is not installed (apt-get install {make.__name__})")
    trust = certify(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base = f"localhost:{port}"
    async with serving(auth__keys=f"web {KEY}") as server:
        async with proxy(make(tmp_path, port, server.port), tmp_path, port):
            async with page(base, trust, f"https://{base}") as client:  # its own page: Host must arrive
                await client.audio(pcm(1.0))
                await client.say(type="input.commit")
                await client.until("response.done")
                assert client.text() == "echo: heard 1000 ms"
            async with page(base, trust, "https://evil.example") as evil:
                assert (await evil.closed())[0] == 1008 and evil.events[0]["code"] == "origin_not_allowed"
            header = {"Authorization": f"Bearer {KEY}"}
            async with httpx.AsyncClient(
                base_url=f"https://{base}", headers=header, verify=trust, trust_env=False
            ) as http:
                assert (await http.get("/health")).json()["status"] == "ready"
                assert (await http.get("/capacity")).status_code == 200
                assert (await http.get("/metrics")).status_code == 404
        await server.until_empty()
    written = logs(tmp_path)
    assert KEY not in written
    if make is nginx:
        assert "GET /v1/stream 101" in written


def test_nginx_waits_longer_than_the_server_pings():
    config = uvicorn_config(make_app(lambda: pytest.fail("not built"), lambda: None), resolve(load()))
    assert config.ws_ping_interval is not None and config.ws_ping_timeout is not None
    recipe = (RECIPES / "nginx.conf").read_text()
    for direction in ("read", "send"):
        found = re.search(rf"proxy_{direction}_timeout (\d+)s;", recipe)
        assert found and int(found[1]) > config.ws_ping_interval + config.ws_ping_timeout
