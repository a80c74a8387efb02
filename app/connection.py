"""uvicorn's connections, with an end for those that do not end by themselves, and a limit on how many."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.protocol import State
from websockets.speedups import apply_mask

REQUEST_LIMIT_S = 20.0  # from a connection's begin to the end of its first request's head
ABORT_AFTER_S = 15.0
MAX_WAITING = 16  # messages a handler may be behind before reading stops, unless one is larger than this:
SMALL_BYTES = 16_384


class HttpConnection(HttpToolsProtocol):
    """Every connection begins as one of these; a WebSocket's goes on as a `Connection`.

    A connection costs a file descriptor before anyone has said a word on it: beyond `max_connections` it is
    closed at once, and one on which no request comes is closed after `REQUEST_LIMIT_S`.
    """

    def __init__(self, *args: Any, max_connections: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._max_connections = max_connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            transport.abort()
        else:
            self.loop.call_later(REQUEST_LIMIT_S, self._abort_if_mute)

    def _abort_if_mute(self) -> None:
        if self.cycle is None and self.transport.get_protocol() is self:
            self.transport.abort()


class Connection(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket, made for many small binary messages.

    A peer that never reads keeps a closing connection open for ever: what was written cannot be flushed. When
    the handler has ended, the connection gets `ABORT_AFTER_S` to close, then it is aborted.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rest = b""  # the begin of a frame that is not whole yet
        self._is_split = True
        self._is_inside_message = False  # its first fragment came, its last did not

    def data_received(self, data: bytes) -> None:
        """Takes whole audio frames out at once, at a third of what the general parser costs.

        That one is given everything else, and only whole frames, so that it is between two of them whenever
        one is taken past it. From the first frame on that is not masked, or over 64 KiB, it gets all.
        """
        if not self.handshake_initiated or not self._is_split:
            super().data_received(data)
            return
        buffer, at = self._rest + data, 0
        while self._is_split and (end := self._end_of_frame(buffer, at)) is not None:
            is_last, opcode = bool(buffer[at] & 0x80), buffer[at] & 0x0F
            is_audio = buffer[at] == 0x82 and not self._is_inside_message and self.conn.state is State.OPEN
            payload = at + (8 if buffer[at + 1] & 0x7F == 126 else 6)
            if is_audio and end - payload <= self.config.ws_max_size:
                self.curr_msg_data_type = "bytes"
                self.frames = [apply_mask(buffer[payload:end], buffer[payload - 4 : payload])]
                self.send_receive_event_to_app()
            else:
                if opcode < 8:  # not a ping, pong or close, which may come in between
                    self._is_inside_message = not is_last
                super().data_received(buffer[at:end])
                if self.transport.is_closing():
                    return
            at = end
        self._rest = buffer[at:]
        if not self._is_split and self._rest:
            super().data_received(self._rest)
            self._rest = b""

    def _end_of_frame(self, buffer: bytes, at: int) -> int | None:
        """Where the frame that begins at `at` ends; None when it is not whole or not to be split off."""
        if len(buffer) < at + 6:
            return None
        flags = buffer[at + 1]
        if flags < 0x80 or flags == 0xFF:
            self._is_split = False
            return None
        size = flags & 0x7F
        end = at + 6 + size if size < 126 else at + 8 + int.from_bytes(buffer[at + 2 : at + 4])
        return end if end <= len(buffer) else None

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        super().on_task_complete(task)
        if not self.disconnected:
            self.loop.call_later(ABORT_AFTER_S, self._abort)

    def send_receive_event_to_app(self) -> None:
        """uvicorn's, changed twice.

        Reading goes on while few and small messages wait: to stop and start it for each one costs more system
        calls than the message. And text that is not UTF-8 is a client's fault: no traceback, and it does not
        raise when a close frame is behind it.
        """
        data, self.frames = b"".join(self.frames), []
        if self.close_sent:
            return
        if self.curr_msg_data_type == "bytes":
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

    def _abort(self) -> None:
        if not self.disconnected:
            self.transport.abort()
