"""A hypothesis state machine speaks the protocol in any order with several sessions at once.

Each step's answer is known, whatever came before: `ping` is a fence behind which it must have arrived.
METRONOME_TEST_FUZZ_EXAMPLES asks for more runs than the 25 (with a fixed seed) of an ordinary test.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, multiple, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from app.inbox import MAX_UNKNOWN_MESSAGES
from engine.events import Error, ResponseDone, ServerEvent, SessionCreated
from engine.types import TurnMode
from tests.fuzz.grammar import Grammar
from tests.support.serving import TIMEOUT_S, Serving, serving
from tests.support.stage import pcm
from tests.support.voices import ToneVoice

NUM_EXAMPLES = int(os.environ.get("METRONOME_TEST_FUZZ_EXAMPLES", 25))
MAX_SESSIONS = 3
MAX_MESSAGE_BYTES = 4096
UNKNOWN = (
    {"type": "hello"},
    {},
    [],
    7,
    None,
    {"type": "ping", "x": 1},
    {"type": "session.update", "turn": 3},
)


class Background:
    """The server on a thread with a loop of its own, for clients that block."""

    def __init__(self) -> None:
        self._running: Future[Serving] = Future()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="server")
        self._thread.start()
        self.server = self._running.result(3 * TIMEOUT_S)
        self._loop = self.server.service.conductor.loop

    async def _run(self) -> None:
        try:
            async with serving(
                voice=ToneVoice(), max_sessions=MAX_SESSIONS, session__max_message_bytes=MAX_MESSAGE_BYTES
            ) as server:
                self._running.set_result(server)
                await self._stop.wait()
        except BaseException as error:
            if not self._running.done():
                self._running.set_exception(error)
            raise

    def until_in_flight(self, count: int) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while self.server.service.gate.in_flight != count:
            assert time.monotonic() < deadline, "a session that ended keeps its place"
            time.sleep(0.002)

    def until_empty(self) -> None:
        asyncio.run_coroutine_threadsafe(self.server.until_empty(), self._loop).result(2 * TIMEOUT_S)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()


@dataclass(eq=False)
class Talker:
    """One session, and what we know of it."""

    socket: ClientConnection
    mode: TurnMode
    grammar: Grammar = field(default_factory=Grammar)
    num_unknown: int = 0
    num_commits: int = 0

    def say(self, message: object) -> None:
        self.socket.send(json.dumps(message))

    def fence(self) -> list[ServerEvent]:
        """All events up to the answer to a ping."""
        start, num_pongs = len(self.grammar.events), self.grammar.num_pongs
        self.say({"type": "ping"})
        while self.grammar.num_pongs == num_pongs:
            self.grammar.push(self.socket.recv(TIMEOUT_S))
        return self.grammar.events[start:]

    def settle(self) -> None:
        """Every commit comes to exactly one outcome, an answer that ends or `input_empty`."""
        while self.num_outcomes < self.num_commits:
            self.grammar.push(self.socket.recv(TIMEOUT_S))
        if self.mode is TurnMode.MANUAL:
            self.fence()
            assert self.num_outcomes == self.num_commits

    @property
    def num_outcomes(self) -> int:
        if self.mode is not TurnMode.MANUAL:
            return 0
        empty = [e for e in self.grammar.events if isinstance(e, Error) and e.code == "input_empty"]
        return len(empty) + sum(isinstance(e, ResponseDone) for e in self.grammar.events)

    def closed(self) -> int | None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                self.grammar.push(self.socket.recv(TIMEOUT_S))
        return self.socket.close_code

    def errors(self) -> set[str]:
        return {e.code for e in self.fence() if isinstance(e, Error)}

    @property
    def owed(self) -> set[str]:
        """Errors that may come at any time: a commit is answered when what was committed has been heard."""
        return {"input_empty"} if self.num_commits else set()


class Protocol(RuleBasedStateMachine):
    """`talkers` are sessions that are open: every rule leaves them so, or takes them out."""

    background: Background
    talkers = Bundle("talkers")

    def __init__(self) -> None:
        super().__init__()
        self._open: list[Talker] = []
        self._sockets = contextlib.ExitStack()

    @rule(
        target=talkers,
        mode=st.sampled_from(TurnMode),
        rate=st.sampled_from([8000, 16000, 48000]),
        voice=st.sampled_from(["on", "off"]),
    )
    def open(self, mode: TurnMode, rate: int, voice: str):
        socket = self._connect(f"turn={mode}&sample_rate={rate}&voice={voice}")
        talker = Talker(socket, mode)
        if len(self._open) == MAX_SESSIONS:
            assert talker.closed() == 1013
            (error,) = talker.grammar.events
            assert isinstance(error, Error) and error.code == "at_capacity" and error.retry_after_ms
            return multiple()
        first = talker.fence()[0]
        assert isinstance(first, SessionCreated) and (first.turn, first.sample_rate) == (mode, rate)
        assert first.voice == (voice == "on")
        self._open.append(talker)
        return talker

    @rule(query=st.sampled_from(["sample_rate=1", "max_tokens=x", "turn=never", "voice=1"]))
    def open_badly(self, query: str) -> None:
        assert Talker(self._connect(query), TurnMode.MANUAL).closed() == 1003

    @rule(talker=talkers, data=st.binary(max_size=200) | st.sampled_from([pcm(0.1), pcm(0.02), bytes(4000)]))
    def audio(self, talker: Talker, data: bytes) -> None:
        talker.socket.send(data)
        assert talker.errors() <= talker.owed

    @rule(talker=talkers)
    def commit(self, talker: Talker) -> None:
        """One commit, one outcome: an answer or "nothing was heard"."""
        talker.say({"type": "input.commit"})
        if talker.mode is TurnMode.MANUAL:
            talker.num_commits += 1
            assert talker.errors() <= talker.owed
        else:
            assert "wrong_turn_mode" in talker.errors()

    @rule(talker=talkers)
    def cancel(self, talker: Talker) -> None:
        talker.say({"type": "response.cancel"})
        assert talker.errors() <= talker.owed

    @rule(talker=talkers, played_ms=st.integers(0, 86_400_000), data=st.data())
    def played(self, talker: Talker, played_ms: int, data: st.DataObject) -> None:
        response_id = data.draw(st.sampled_from(["nobody's", *talker.grammar.response_ids]))
        talker.say({"type": "response.played", "response_id": response_id, "played_ms": played_ms})
        assert talker.errors() <= talker.owed

    @rule(talker=talkers, text=st.text(max_size=20), tokens=st.integers(1, 4096))
    def update(self, talker: Talker, text: str, tokens: int) -> None:
        talker.say({"type": "session.update", "instructions": text, "max_tokens": tokens})
        assert talker.errors() <= talker.owed

    @rule(talker=talkers, message=st.sampled_from(UNKNOWN))
    def not_understood(self, talker: Talker, message: object) -> None:
        if talker.num_unknown == MAX_UNKNOWN_MESSAGES - 1:
            return  # the next one closes; test_stream.py has that
        talker.num_unknown += 1
        talker.say(message)
        assert "not_understood" in talker.errors()

    @rule(talker=consumes(talkers))
    def huge(self, talker: Talker) -> None:
        talker.socket.send(bytes(MAX_MESSAGE_BYTES + 1))
        self._gone(talker, 1009)

    @rule(talker=consumes(talkers), text=st.sampled_from(["", "{", "nonsense", "[" * 2000]))
    def no_json(self, talker: Talker, text: str) -> None:
        talker.socket.send(text)
        self._gone(talker, 1007)

    @rule(talker=consumes(talkers))
    def leave(self, talker: Talker) -> None:
        talker.settle()
        talker.socket.close()
        self._gone(talker, 1000)

    @rule(talker=consumes(talkers))
    def vanish(self, talker: Talker) -> None:
        talker.socket.socket.close()
        self._gone(talker, None)

    def teardown(self) -> None:
        with self._sockets:
            for talker in self._open:
                talker.settle()
        self.background.until_empty()

    # inside

    def _connect(self, query: str) -> ClientConnection:
        url = f"ws://127.0.0.1:{self.background.server.port}/v1/stream?{query}"
        return self._sockets.enter_context(connect(url, proxy=None))

    def _gone(self, talker: Talker, code: int | None) -> None:
        """Its place is free again, soon after its end."""
        if code is not None:
            assert talker.closed() == code
        self._open.remove(talker)
        self.background.until_in_flight(len(self._open))


@pytest.fixture
def background() -> Iterator[Background]:
    background = Background()
    yield background
    background.stop()


def test_any_order_of_messages_is_answered_as_documented(
    background: Background, caplog: pytest.LogCaptureFixture
):
    Protocol.background = background
    run_machine(
        Protocol,
        settings=settings(
            max_examples=NUM_EXAMPLES,
            stateful_step_count=30,
            deadline=None,
            derandomize=NUM_EXAMPLES == 25,
            database=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
    assert not [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
