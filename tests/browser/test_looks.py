"""How the page presents itself: to any width, to a screen reader, and to nobody."""

from __future__ import annotations

import asyncio

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, Request, expect

from tests.support.browsing import QUESTION, begin, visit
from tests.support.serving import Serving, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("width", [320, 390, 768, 1440, 2200])
async def test_it_fits(browser: Browser, server: Serving, width: int):
    async with visit(browser, server.port, viewport={"width": width, "height": 844}) as page:
        await expect(page["server-status"]).to_have_text("Server ready")
        overflow = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert await page.page.evaluate(overflow) <= 0
        buttons = page.page.locator("button:visible")
        boxes = [await button.bounding_box() for button in await buttons.all()]
        assert all(box is not None and box["height"] >= 36 for box in boxes)
        sizes = """() => [...document.querySelectorAll("canvas")].map(
            (canvas) => [canvas.width, canvas.clientWidth * devicePixelRatio])"""
        assert all(abs(pixels - wanted) <= 1 for pixels, wanted in await page.page.evaluate(sizes))


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing(browser: Browser, scheme: str):
    async with (
        serving(max_sessions=1) as server,
        visit(
            browser, server.port, own_microphone=True, color_scheme=scheme, reduced_motion="reduce"
        ) as page,
    ):
        await expect(page["server-status"]).to_have_text("Server ready")
        await audit(page.page, "empty")
        await begin(page)
        speaking = asyncio.create_task(page.say(*QUESTION))
        await page.until_floor("you")
        await audit(page.page, "speaking")
        await speaking
        await expect(page.entries("server")).to_have_attribute("data-state", "done")
        await audit(page.page, "answered")
        await page["open-settings"].click()
        await audit(page.page, "settings")
        await page.page.keyboard.press("Escape")
        await page["start"].click()
        await server.until_empty()
        async with server.client() as other:
            await other.until("session.created")
            await page["start"].click()
            await expect(page["problem"]).to_be_visible()
            await audit(page.page, "refused")


async def audit(page: Page, state: str) -> None:
    found = await Axe().run(page)
    violations = found.response["violations"]
    assert not violations, f"{state}: {found.generate_report()}"


async def test_nothing_is_asked_of_the_server_while_nobody_looks(browser: Browser, server: Serving):
    async with visit(browser, server.port) as page:
        await expect(page["server-status"]).to_have_text("Server ready")
        asked = 0

        def count(request: Request) -> None:
            nonlocal asked
            asked += "/capacity" in request.url

        page.page.on("request", count)
        show = """(isHidden) => {
            Object.defineProperty(document, "hidden", {value: isHidden, configurable: true});
            document.dispatchEvent(new Event("visibilitychange"));
        }"""
        await page.page.evaluate(show, True)
        await page.page.evaluate("() => new Promise((resolve) => setTimeout(resolve, 300))")
        assert asked == 0
        await page.page.evaluate(show, False)

        async def asks() -> bool:
            return asked > 0

        await page.until(asks, "asked again")
