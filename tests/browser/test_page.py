"""The page over a real server with the null engine: what is served, and a conversation without trouble."""

from __future__ import annotations

import asyncio
import re
import tomllib
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Browser, expect

from app.page import DIRECTORY, content_policy, read_assets
from tests.support.browsing import QUESTION, begin, visit
from tests.support.serving import Serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

# what is served


async def test_the_page_is_served_with_types_that_browsers_run_and_headers_that_bind_them(server: Serving):
    for name, asset in read_assets().items():
        response = await server.get(f"/static/{name}")
        assert (response.status_code, response.content) == (200, asset.body)
        assert response.headers["content-type"] == asset.media_type
    index = await server.get("/")
    assert index.headers["content-type"] == "text/html; charset=utf-8"
    assert index.headers["cache-control"] == "no-cache"
    assert index.headers["x-content-type-options"] == "nosniff"
    assert "microphone=(self)" in index.headers["permissions-policy"]
    policy = dict(part.strip().split(" ", 1) for part in index.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["script-src"] == "'self'"
    assert policy["connect-src"] == f"'self' ws://127.0.0.1:{server.port} wss://127.0.0.1:{server.port}"


async def test_a_wheel_has_every_file_of_the_page():
    project = tomllib.loads((DIRECTORY.parent / "pyproject.toml").read_text())
    data = project["tool"]["setuptools"]["package-data"]
    for name in read_assets():
        folder = ".".join(["static", *Path(name).parts[:-1]])
        assert any(Path(name).match(pattern) for pattern in data[folder]), name


async def test_what_a_browser_has_is_not_sent_again(server: Serving):
    url = f"http://127.0.0.1:{server.port}/static/app.js"
    async with httpx.AsyncClient(trust_env=False) as http:
        etag = (await http.get(url)).headers["etag"]
        again = await http.get(url, headers={"If-None-Match": f'"other", W/{etag}'})
        assert (again.status_code, again.content) == (304, b"")
        assert (await http.get(url, headers={"If-None-Match": '"other"'})).status_code == 200
        head = await http.head(url)
        assert (head.status_code, head.content) == (200, b"") and int(head.headers["content-length"]) > 0


@pytest.mark.parametrize(
    "path", ["nothing.js", "%2e%2e/pyproject.toml", "..%2fpyproject.toml", "%00", "css", ""]
)
async def test_nothing_else_is_served(server: Serving, path: str):
    assert (await server.get(f"/static/{path}")).status_code == 404


@pytest.mark.parametrize("host", ["a.example; script-src *", "a b", "", "x\ty", "[::1]:80;"])
async def test_a_host_header_writes_no_policy(host: str):
    assert "ws:" not in content_policy(host)


async def test_hosts_that_are_hosts_may_be_spoken_to():
    for host in ("talk.example.com", "127.0.0.1:8000", "[::1]:8000"):
        assert f" ws://{host} wss://{host};" in content_policy(host)


# a conversation


async def test_a_conversation_by_keyboard_alone(browser: Browser, server: Serving):
    async with visit(browser, server.port, own_microphone=True) as page:
        await page.page.keyboard.press("Tab")
        assert (
            await page.page.evaluate("() => document.activeElement.textContent") == "Skip to the conversation"
        )
        for _ in range(2):
            await page.page.keyboard.press("Tab")
        await expect(page["start"]).to_be_focused()
        await page.page.keyboard.press("Enter")
        await page.until_state("live")
        await expect(page["start"]).to_have_text("End conversation")
        await expect(page["status"]).to_have_text("Connected. Talk now.")
        await page.page.keyboard.press("Enter")
        await page.until_state("idle")
        await expect(page["start"]).to_have_text("Start talking")
        await server.until_empty()


async def test_what_is_said_is_shown_and_plots_and_gauge_move(browser: Browser, server: Serving):
    async with visit(browser, server.port, own_microphone=True) as page:
        await expect(page["server-status"]).to_have_text("Server ready")
        await expect(page["model"]).to_have_text("null")
        await expect(page["capacity-words"]).to_have_text("0 of 8 places taken")
        before = await page.page.evaluate("() => document.getElementById('lateness').toDataURL()")
        await begin(page)
        await expect(page["capacity-words"]).to_have_text("1 of 8 places taken")
        assert await page.page.locator("#places .taken").count() == 1
        speaking = asyncio.create_task(page.say(*QUESTION))
        await page.until_floor("you")

        async def needle_moves() -> bool:
            return int(await page["input-level"].get_attribute("aria-valuenow") or 0) > 20

        await page.until(needle_moves, "the level moved")
        await speaking
        await expect(page.entries("you")).to_have_text(re.compile(r"You\s*heard \d+ ms"))
        await expect(page.entries("server")).to_have_attribute("data-state", "done")
        await expect(page.entries("server")).to_contain_text("echo: heard")
        await expect(page["announcer"]).to_contain_text("Metronome: echo: heard")
        await expect(page["late-last"]).to_have_text(re.compile(r"^[\d,.]+ m?s$"))
        await expect(page["lateness"]).to_have_attribute("aria-label", re.compile("the budget is 2,000 ms"))
        after = await page.page.evaluate("() => document.getElementById('lateness').toDataURL()")
        assert before != after
        asked = (await page.page.evaluate("() => testMicrophone.constraints"))["audio"]
        assert asked["echoCancellation"] and asked["noiseSuppression"] and asked["autoGainControl"]
        assert "sampleRate" not in asked  # Firefox refuses a forced one
        await page["start"].click()
        await server.until_empty()


async def test_push_to_talk(browser: Browser, server: Serving):
    async with visit(browser, server.port, own_microphone=True, settings='{"turn": "manual"}') as page:
        await begin(page)
        button = page["talk"]
        await expect(button).to_be_visible()
        await expect(button).to_have_text("Hold to talk")
        samples, rate = QUESTION
        for number in (1, 2):
            await button.focus()
            await page.page.keyboard.down("Space")
            await expect(button).to_have_attribute("aria-pressed", "true")
            await page.say(samples[:rate], rate)
            await page.page.keyboard.up("Space")
            await expect(page.entries("server")).to_have_count(number)
        heard = [int(text.split()[-2]) for text in await page.entries("you").all_inner_texts()]
        assert len(heard) == 2 and all(1000 <= ms < 5000 for ms in heard)  # what was said while it was held
        box = await button.bounding_box()
        assert box is not None
        await page.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 5)
        await page.page.mouse.down()
        await page.say(samples[:rate], rate)
        await page.page.mouse.up()
        await expect(page.entries("server")).to_have_count(3)
        await button.dispatch_event("click")  # as a screen reader clicks: nothing was held
        await expect(button).to_have_attribute("aria-pressed", "true")
        await button.dispatch_event("click")
        await expect(button).to_have_attribute("aria-pressed", "false")


async def test_settings_reach_the_running_session_and_the_next_visit(browser: Browser, server: Serving):
    async with visit(browser, server.port, own_microphone=True) as page:
        await begin(page)
        await page["open-settings"].click()
        await page.page.get_by_label("Instructions").fill("Be brief.")
        await page.page.get_by_label("Push to talk").check()
        await page.page.get_by_role("button", name="Save").click()
        await expect(page["talk"]).to_be_visible()  # the server has said that it is so
        (session,) = server.service.conductor.scheduler
        assert session._conversation.instructions == "Be brief."
        await page.page.reload()
        await page["open-settings"].click()
        assert await page.page.get_by_label("Instructions").input_value() == "Be brief."
        assert await page.page.get_by_label("Push to talk").is_checked()
