"""What can go wrong around a conversation, and what the page says and does about it."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from playwright.async_api import Browser, WebSocketRoute, expect

from engine.conductor import Phase
from engine.models.null import NullFamily
from engine.null import NullEngine
from tests.support.browsing import INSECURE_HOST, QUESTION, begin, visit
from tests.support.serving import Serving, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
KEY = "web-key-0123456789"


async def test_a_full_server_says_why_counts_down_and_lets_in_by_itself(browser: Browser):
    async with serving(max_sessions=1) as server, visit(browser, server.port, own_microphone=True) as page:
        server.service.gate.DEFAULT_RETRY_MS = 3000  # pyright: ignore[reportAttributeAccessIssue]
        async with server.client() as other:
            await other.until("session.created")
            await page["start"].click()
            await expect(page["problem"]).to_contain_text("All places are taken")
            await expect(page["capacity-words"]).to_contain_text("1 of 1 places taken: full")
            seen: set[int] = set()

            async def counts_down() -> bool:
                found = re.search(r"in (\d+) s", await page["problem-countdown"].inner_text())
                seen.update([int(found[1])] if found else [])
                return len(seen) >= 2

            await page.until(counts_down, "counted down")
            refused = server.service.gate.refused["slots"] + server.service.gate.refused["load"]
            await page["problem-retry"].click()

            async def asked_again() -> bool:
                gate = server.service.gate
                return gate.refused["slots"] + gate.refused["load"] > refused

            await page.until(asked_again, "asked again")
            await expect(page["problem-retry"]).to_have_text("Try now")
        await page.until_state("live")  # the place is free: nobody pressed anything
        await expect(page["problem"]).to_be_hidden()


async def test_waiting_can_be_given_up(browser: Browser):
    async with serving(max_sessions=1) as server, visit(browser, server.port, own_microphone=True) as page:
        async with server.client() as other:
            await other.until("session.created")
            await page["start"].click()
            await expect(page["start"]).to_have_text("Stop waiting")
            await expect(page["problem-cancel"]).to_be_hidden()
            await page["start"].click()
            await page.until_state("idle")
            await expect(page["problem"]).to_be_hidden()
            await expect(page["start"]).to_be_focused()


def cut_all(server: Serving) -> None:
    for connection in list(server.server.server_state.connections):
        connection.transport.abort()  # pyright: ignore[reportAttributeAccessIssue]


async def test_a_lost_connection_is_taken_up_again(browser: Browser, server: Serving):
    async with visit(browser, server.port, own_microphone=True) as page:
        page.is_server_lost = True
        await begin(page)
        admitted = server.service.gate.num_admitted
        cut_all(server)
        await expect(page["problem"]).to_contain_text("The connection was lost")
        await page.until_state("live")
        await expect(page["problem"]).to_be_hidden()
        assert server.service.gate.num_admitted == admitted + 1
        speaking = asyncio.create_task(page.say(*QUESTION))
        await expect(page.entries("server")).to_have_attribute("data-state", "done")
        await speaking


async def test_a_connection_lost_while_the_button_is_held(browser: Browser, server: Serving):
    async with visit(browser, server.port, own_microphone=True, settings='{"turn": "manual"}') as page:
        page.is_server_lost = True
        await begin(page)
        button = page["talk"]
        await button.dispatch_event("click")  # as a screen reader does: held until the next one
        await expect(button).to_have_text("Release to send")
        cut_all(server)
        await expect(page["problem"]).to_contain_text("The connection was lost")
        await page.until_state("live")
        await expect(button).to_be_visible()
        await expect(button).to_have_text("Hold to talk")


async def test_a_network_that_goes_silent_is_noticed(browser: Browser, server: Serving):
    """No close, no error: the machine at the other end is simply gone. A server of ours cannot do that."""
    silent_from = 2  # it answers so many pings
    num_sockets = 0

    def mute(socket: WebSocketRoute) -> None:
        nonlocal num_sockets
        num_sockets += 1
        num_pings = 0

        def on_message(message: str | bytes) -> None:
            nonlocal num_pings
            if isinstance(message, bytes):
                return
            if json.loads(message)["type"] == "auth":
                socket.send(json.dumps({"type": "session.created", "turn": "server_vad", "budget_ms": 2000}))
            elif json.loads(message)["type"] == "ping":
                num_pings += 1
                if num_pings <= silent_from:
                    socket.send(json.dumps({"type": "pong"}))

        socket.on_message(on_message)

    async with visit(browser, server.port, own_microphone=True) as page:
        await page.page.route_web_socket("**/v1/stream*", mute)
        await page.page.clock.install()
        await begin(page)
        await page.page.clock.run_for(15_000)
        await page.until_state("live")
        await page.page.clock.run_for(20_000)
        await expect(page["problem"]).to_contain_text("The connection was lost")
        await page.page.clock.run_for(2_000)
        await page.until_state("live")
        assert num_sockets == 2


async def test_a_browser_that_pauses_the_sound(browser: Browser, server: Serving):
    """As phones do for a call: it goes on with the next touch."""
    keep = """{
        const Original = AudioContext;
        globalThis.contexts = [];
        globalThis.AudioContext = class extends Original {
            constructor(...args) { super(...args); contexts.push(this); }
        };
    }"""
    async with visit(browser, server.port, own_microphone=True, script=keep) as page:
        await begin(page)
        await page.page.evaluate("() => contexts[0].suspend()")
        await expect(page["notice"]).to_contain_text("touch the page")
        await page["floor"].click()

        async def runs() -> bool:
            return await page.page.evaluate("() => contexts[0].state") == "running"

        await page.until(runs, "ran again")


async def test_a_draining_server(browser: Browser):
    async with serving() as server, visit(browser, server.port, own_microphone=True) as page:
        page.is_server_lost = True
        await begin(page)
        await server.service.conductor.drain(0.0)
        assert server.service.conductor.phase is Phase.DRAINING
        await expect(page["problem"]).to_contain_text("The server is shutting down")
        await expect(page["problem-countdown"]).to_be_visible()
        await expect(page["server-status"]).to_have_text("Server shutting down")


async def test_an_engine_that_dies_is_waited_for(browser: Browser):
    engines: list[NullEngine] = []

    def make_engine() -> NullEngine:
        engines.append(NullEngine())
        return engines[-1]

    async with (
        serving(NullFamily(), make_engine) as server,
        visit(browser, server.port, own_microphone=True) as page,
    ):
        await begin(page)
        engines[-1].break_down("a test broke it")
        await expect(page["problem"]).to_contain_text("The model stopped")
        await server.until_ready()
        await page["problem-retry"].click()
        await page.until_state("live")
        assert len(engines) == 2


async def test_a_key_is_asked_for_and_kept_for_the_tab(browser: Browser):
    async with (
        serving(auth__keys=f"web {KEY}") as server,
        visit(browser, server.port, own_microphone=True) as page,
    ):
        page.is_server_lost = True  # the browser logs the 401 of /capacity
        await expect(page["server-status"]).to_have_text("Needs a key")
        await page["start"].click()
        field = page["key-value"]
        await field.fill("not-the-key-0123456789")
        await page.page.get_by_role("button", name="Use this key").click()
        await expect(page["key-text"]).to_contain_text("not known here")
        await field.fill(KEY)
        await field.press("Enter")
        await page.until_state("live")
        await expect(page["server-status"]).to_have_text("Server ready")
        await expect(page["capacity-words"]).to_have_text("1 of 8 places taken")
        stored = """() => [
            JSON.stringify(localStorage), document.cookie, location.href, document.body.innerHTML
        ].join()"""
        assert KEY not in await page.page.evaluate(stored)
        await page["start"].click()
        await page.page.reload()
        await begin(page)  # nobody is asked again


async def test_an_insecure_origin_is_told_exactly_what_to_do(browser: Browser, server: Serving):
    async with visit(browser, server.port, host=INSECURE_HOST, may_listen=False) as page:
        await expect(page["problem"]).to_contain_text("gives this page no microphone")
        await expect(page["problem"]).to_contain_text(
            f"ssh -L {server.port}:localhost:{server.port} {INSECURE_HOST}"
        )
        await expect(page["problem"]).to_contain_text("--tls-cert")
        await expect(page["start"]).to_be_disabled()
        await expect(page["server-status"]).to_have_text("Server ready")  # the gauge works all the same


async def test_a_denied_microphone(browser: Browser, server: Serving):
    async with visit(browser, server.port, may_listen=False) as page:
        await page["start"].click()
        await expect(page["problem"]).to_contain_text("The microphone is not allowed")
        await expect(page["problem-steps"].locator("li")).not_to_have_count(0)
        await expect(page["start"]).to_have_text("Start talking")
        assert server.service.gate.in_flight == 0  # nobody holds a place while the browser asks


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("NotFoundError", "No microphone was found"),
        ("NotReadableError", "The microphone is busy"),
        ("AbortError", "could not be opened"),
    ],
)
async def test_a_microphone_that_cannot_be_had(browser: Browser, server: Serving, name: str, words: str):
    script = (
        f"navigator.mediaDevices.getUserMedia = async () => {{ throw new DOMException('no', '{name}'); }}"
    )
    async with visit(browser, server.port, script=script) as page:
        await page["start"].click()
        await expect(page["problem"]).to_contain_text(words)
        await expect(page["problem-retry"]).to_have_text("Start again")


async def test_a_microphone_that_goes_away(browser: Browser, server: Serving):
    async with visit(browser, server.port, own_microphone=True) as page:
        await begin(page)
        ended = "() => testMicrophone.destination.stream.getTracks()[0].dispatchEvent(new Event('ended'))"
        await page.page.evaluate(ended)
        await expect(page["problem"]).to_contain_text("The microphone went away")
        await server.until_empty()
