"""Below messages: WebSocket frames that no library would send, on raw sockets, against real uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator

import pytest
from websockets.frames import Opcode

from tests.fuzz.messages import Messages
from tests.fuzz.test_messages import next_session_works
from tests.support.serving import TIMEOUT_S, Serving, serving

NUM_SESSIONS = 300
HANDSHAKE = (
    b"GET /v1/stream?turn=manual HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def raw(opcode: int, data: bytes, is_final: bool = True, is_masked: bool = True) -> bytes:
    """A frame as it is on the wire, whether or not it may be; the mask is all zeros."""
    head = bytes([opcode | 0x80 * is_final])
    flag = 0x80 * is_masked
    length = len(data)
    size = bytes([flag | length]) if length < 126 else bytes([flag | 126]) + length.to_bytes(2)
    return head + size + bytes(4 * is_masked) + data


def frame(rng: random.Random, messages: Messages) -> bytes:
    """Mostly a good one, whole or in parts; else of any opcode, with flags and lengths that lie."""
    message = messages.next(gentle=True)
    opcode = Opcode.BINARY if isinstance(message, bytes) else Opcode.TEXT
    data = message if isinstance(message, bytes) else message.encode()
    match rng.randrange(14):
        case 0:
            return raw(Opcode.TEXT, b"\xff\xfe" + data)  # not UTF-8
        case 1 | 2:
            half = len(data) // 2
            return raw(opcode, data[:half], is_final=False) + raw(Opcode.CONT, data[half:])
        case 3:
            return raw(rng.randrange(16), data)
        case 4:
            closes = [b"", b"\x03", b"\x03\xe8bye", b"\x03\xe8\xff", b"\x00\x01", b"\x03\xe8" + bytes(200)]
            return raw(Opcode.CLOSE, rng.choice(closes))
        case 5:
            return raw(opcode, data, is_masked=False)
        case 6:
            whole = bytearray(raw(opcode, data))
            whole[rng.randrange(min(len(whole), 14))] ^= 1 << rng.randrange(8)
            return bytes(whole)
        case 7:
            return rng.randbytes(rng.randrange(1, 100))
        case 8:
            return raw(rng.choice([Opcode.PING, Opcode.PONG]), data[:125])
        case _:
            return raw(opcode, data)


@contextlib.asynccontextmanager
async def raw_socket(server: Serving) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A session whose frames are the test's own; gone without a word at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(HANDSHAKE)
        async with asyncio.timeout(TIMEOUT_S):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
        yield reader, writer
    finally:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def test_no_frame_harms_the_server(caplog: pytest.LogCaptureFixture):
    rng, messages = random.Random(4), Messages(4)
    async with serving(max_sessions=64) as server:
        for _ in range(NUM_SESSIONS):
            async with raw_socket(server) as (_, writer):
                for _ in range(rng.randrange(1, 20)):
                    writer.write(frame(rng, messages))
                await asyncio.sleep(rng.choice([0, 0, 0.01]))
        await server.until_empty()
        await next_session_works(server)
    errors = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert not errors, {r.getMessage() + str(r.exc_text)[-300:] for r in errors}


@pytest.mark.parametrize(("behind", "code"), [(b"", 1007), (raw(Opcode.CLOSE, b"\x03\xe8"), 1000)])
async def test_text_that_is_not_utf8_closes(caplog: pytest.LogCaptureFixture, behind: bytes, code: int):
    """With 1007, or as a close frame in the same packet asks; without a traceback in any case."""
    async with serving() as server:
        async with raw_socket(server) as (reader, writer):
            writer.write(raw(Opcode.TEXT, b'{"type": "\xff"}') + behind)
            async with asyncio.timeout(TIMEOUT_S):
                said = await reader.read()
        assert said[said.rindex(0x88) + 2 :][:2] == code.to_bytes(2)
        await server.until_empty()
        await next_session_works(server)
    assert not [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
