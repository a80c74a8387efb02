"""uvicorn's connections, with an end for those that do not end by themselves, and a limit on how many."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, MutableMapping
from types import GeneratorType
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import apply_mask  # pyright: ignore[reportPrivateImportUsage] - in C or in Python
from websockets.http11 import Request
from websockets.protocol import Protocol, State
from websockets.streams import StreamReader

REQUEST_LIMIT_S = 20.0  # from a connection's begin to the end of its first request's head
ABORT_AFTER_S = 15.0
MAX_WAITING = 16  # messages a handler may be behind before reading stops, unless one is larger than this:
SMALL_BYTES = 16_384
_WHOLE_BINARY = 0x82  # a frame's first byte: the only frame of its message, binary, no extension's bits
_MASKED = 0x80  # its second byte: a client's, and its length where that is under 126
_MASKED_16 = 0xFE  # its second byte: a client's, with its length in the two bytes behind
_FRAME_BEGINS = StreamReader.at_eof.__code__  # where websockets' parser waits for a frame's first byte
_EXTENSION = "metronome.connection"  # in the ASGI scope: the connection itself

OnAudio = Callable[[bytes], None]


def hand_over_audio(scope: MutableMapping[str, Any], on_audio: OnAudio) -> None:
    """Have binary messages given to `on_audio` as they are read, past the queue and the handler's task.

    Those are a third of what a frame costs (bench/results/front_end.md). Order is kept: while another message
    waits for the handler, binary ones wait behind it. No-op where the server is not ours.
    """
    if (connection := scope.get("extensions", {}).get(_EXTENSION)) is not None:
        connection.on_audio = on_audio


class HttpConnection(HttpToolsProtocol):
    """Every connection begins as one of these; a WebSocket's goes on as a `Connection`.

    A connection costs a file descriptor before anyone has said a word on it: beyond `max_connections` it is
    closed at once, and one on which no request comes is closed after `REQUEST_LIMIT_S`.
    """

    def __init__(self, *args: Any, max_connections: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_connections = max_connections
        self._mute_limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            transport.abort()
        else:
            self._mute_limit = self.loop.call_later(REQUEST_LIMIT_S, transport.abort)

    # The timer holds the connection, so it goes with the first of these; a flood would pile them up.

    def on_headers_complete(self) -> None:
        self._cancel()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        super().connection_lost(exc)

    def _cancel(self) -> None:
        if self._mute_limit is not None:
            self._mute_limit.cancel()
            self._mute_limit = None


class Connection(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket, made for many small binary messages.

    A peer that never reads keeps a closing connection open for ever: what was written cannot be flushed. When
    the handler has ended, the connection gets `ABORT_AFTER_S` to close, then it is aborted.
    """

    on_audio: OnAudio | None = None
    _close_limit: asyncio.TimerHandle | None = None

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code == 101:
            extensions: dict[str, Any] = self.scope.setdefault("extensions", {})
            extensions[_EXTENSION] = self

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        super().on_task_complete(task)
        if not self.disconnected:
            self._close_limit = self.loop.call_later(ABORT_AFTER_S, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._close_limit is not None:
            self._close_limit.cancel()
        self.on_audio = None  # the session's, which it would hold
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """websockets' parser is a third of what a frame then costs: audio in whole frames goes past it too.

        Only where it is between two messages, and nothing waits for the handler. All else is its own, the
        rest of a frame that was cut included.
        """
        if (
            self.on_audio is not None
            and not self.close_sent
            and self.queue.empty()
            and _is_between_messages(self.conn)
        ):
            data = _hand_over(data, self.on_audio)
        if data:
            super().data_received(data)

    def send_receive_event_to_app(self) -> None:
        """uvicorn's, changed three times.

        Audio goes straight to whom it was handed over to. Reading goes on while few and small messages wait:
        to stop and start it for each one costs more system calls than the message. And text that is not
        UTF-8 is a client's fault: no traceback, and it does not raise when a close frame is behind it.
        """
        data, self.frames = b"".join(self.frames), []
        if self.close_sent:
            return
        if self.curr_msg_data_type == "bytes":
            if self.on_audio is not None and self.queue.empty():
                self.on_audio(data)
                return
            self.queue.put_nowait({"type": "websocket.receive", "bytes": data})
        else:
            try:
                self.queue.put_nowait({"type": "websocket.receive", "text": data.decode()})
            except UnicodeDecodeError:
                self.conn.fail(1007, "text that is not UTF-8")
                self.handle_parser_exception()
                return
        is_much = len(data) > SMALL_BYTES or self.queue.qsize() >= MAX_WAITING
        if is_much and not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()


def _is_between_messages(conn: Protocol) -> bool:
    """Whether the next byte is a message's first.

    An empty buffer does not say so: where a read ended right behind a frame's header, the parser has taken
    the header and waits for the payload, which may look like a frame.
    """
    if conn.state is not State.OPEN or conn.current_size is not None:
        return False
    waits: Any = conn.parser
    while isinstance(inner := waits.gi_yieldfrom, GeneratorType):
        waits = inner
    return waits.gi_code is _FRAME_BEGINS


def _hand_over(data: bytes, on_audio: OnAudio) -> bytes:
    """Give away the messages that `data` begins with: whole binary frames under 64 KiB. What is left of it.

    RFC 6455, section 5.2: first byte, second byte, two more of length if need be, four of mask, payload.
    """
    start = 0
    while len(data) - start >= 6 and data[start] == _WHOLE_BINARY:
        second, mask = data[start + 1], start + 2
        if second == _MASKED_16:
            length, mask = int.from_bytes(data[mask : mask + 2]), mask + 2
        elif _MASKED <= second < _MASKED_16:
            length = second - _MASKED
        else:
            break
        end = mask + 4 + length
        if end > len(data):
            break
        on_audio(apply_mask(data[mask + 4 : end], data[mask : mask + 4]))
        start = end
    return data[start:]
