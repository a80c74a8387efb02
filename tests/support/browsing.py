"""The demo page in a real Chromium: no fault goes unseen, its sound is recorded, its microphone is ours."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from fastapi import FastAPI, Response
from playwright.async_api import Browser, ConsoleMessage, Locator, Page, async_playwright, expect

from tests.support.serving import TIMEOUT_S, Serving
from tests.support.speech import recording

_SAMPLES, _RATE = recording("austen-0880.wav")
QUESTION = _SAMPLES[: round(1.3 * _RATE)], _RATE  # a few words: samples and their rate
HERE = Path(__file__).parent
INSECURE_HOST = "metronome.test"  # this machine, under a name that browsers do not trust without TLS
expect.set_options(timeout=1000 * TIMEOUT_S)
NETWORK = "Failed to load resource", "WebSocket connection to"  # what Chromium itself says of a lost server


@contextlib.asynccontextmanager
async def chromium(microphone: Path | None = None) -> AsyncIterator[Browser]:
    """Debian's; autoplay as users have it. `microphone`: a recording that the fake device plays once."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    arguments = [
        "--use-fake-device-for-media-stream",
        f"--host-resolver-rules=MAP {INSECURE_HOST} 127.0.0.1",
    ]
    if microphone is not None:
        arguments.append(f"--use-file-for-fake-audio-capture={microphone}%noloop")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program, args=arguments)
        try:
            yield browser
        finally:
            await browser.close()


@dataclass
class Visit:
    """One open page. Elements by their ids: `visit["start"]`."""

    page: Page
    host: str
    is_server_lost: bool = False  # the test takes it away, and the browser says so
    faults: list[str] = field(default_factory=list)

    def __getitem__(self, element_id: str) -> Locator:
        return self.page.locator(f"#{element_id}")

    def entries(self, who: str) -> Locator:
        """`you` or `server`."""
        return self.page.locator(f".entry.{who}")

    async def until(self, condition: Callable[[], Any], what: str, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until an async condition holds. (Playwright's own wait evaluates strings: forbidden here.)"""
        try:
            async with asyncio.timeout(timeout_s):
                while not await condition():
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(
                f"never {what}; the page says: {await self.page.inner_text('body')}"
            ) from None

    async def until_floor(self, *who: str) -> None:
        async def condition() -> bool:
            return await self["floor"].get_attribute("data-who") in who

        await self.until(condition, f"the floor was {who}")

    async def until_state(self, name: str) -> None:
        async def condition() -> bool:
            return await self.page.locator("body").get_attribute("data-state") == name

        await self.until(condition, f"the state was {name}")

    async def say(self, samples: np.ndarray, rate: int) -> None:
        """Into the page's microphone (`own_microphone`), at real time; returns when it is said."""
        data = base64.b64encode(samples.astype("<i2").tobytes()).decode()
        await self.page.evaluate("([data, rate]) => testMicrophone.say(data, rate)", [data, rate])

    async def heard(self) -> tuple[np.ndarray, int]:
        """What the page's loudspeaker has played (`recorded`): float32 samples and their rate."""
        data, rate = await self.page.evaluate("() => testTap.taken()")
        return np.frombuffer(base64.b64decode(data), np.float32), rate

    def _on_console(self, message: ConsoleMessage) -> None:
        is_network = message.text.startswith(NETWORK)
        if message.type in ("error", "warning") and not (is_network and self.is_server_lost):
            self.faults.append(f"console {message.type}: {message.text}")

    def _on_request(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https", "ws", "wss") and parts.netloc != self.host:
            self.faults.append(f"request to another host: {url}")


def add_tap(server: Serving) -> None:
    """Let the server serve the recorder of the page's sound: the page runs no script from elsewhere."""
    app = server.server.config.app
    assert isinstance(app, FastAPI)
    worklet = (HERE / "page_tap_worklet.js").read_text()
    app.add_api_route("/tap.js", lambda: Response(worklet, media_type="text/javascript"))


async def begin(page: Visit) -> None:
    await page["start"].click()
    await page.until_state("live")


@contextlib.asynccontextmanager
async def visit(
    browser: Browser,
    port: int,
    *,
    host: str = "127.0.0.1",
    may_listen: bool = True,
    own_microphone: bool = False,
    recorded: bool = False,
    settings: str | None = None,
    script: str | None = None,
    path: str = "/",
    **context: Any,
) -> AsyncIterator[Visit]:
    """Opens the page; fails afterwards on any console error, exception, policy violation or foreign request.

    `recorded` needs `add_tap`; `settings`: JSON that an earlier visit left; `script`: runs before
    the page's own.
    """
    context.setdefault("viewport", {"width": 1280, "height": 800})
    own = await browser.new_context(**context)
    if may_listen:
        await own.grant_permissions(["microphone"])
    page = await own.new_page()
    page.set_default_timeout(1000 * TIMEOUT_S)
    visited = Visit(page, f"{host}:{port}")
    page.on("console", visited._on_console)
    page.on("pageerror", lambda error: visited.faults.append(f"exception: {error}"))
    page.on("request", lambda request: visited._on_request(request.url))
    page.on("websocket", lambda socket: visited._on_request(socket.url))
    if own_microphone:
        await page.add_init_script(path=HERE / "page_microphone.js")
    if recorded:
        await page.add_init_script(path=HERE / "page_tap.js")
    if settings is not None:
        await page.add_init_script(f"localStorage.setItem('metronome.settings', {settings!r})")
    if script is not None:
        await page.add_init_script(script)
    try:
        await page.goto(f"http://{visited.host}{path}")
        yield visited
        assert not visited.faults, visited.faults
    finally:
        await own.close()
