"""uvicorn's WebSocket connection, plus an end for those that do not end by themselves."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

ABORT_AFTER_S = 15.0


class Connection(WebSocketsSansIOProtocol):
    """A peer that never reads keeps a closing connection open for ever: what was written cannot be flushed.

    When the handler has ended, the connection gets `ABORT_AFTER_S` to close, then it is aborted.
    """

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        super().on_task_complete(task)
        if not self.disconnected:
            self.loop.call_later(ABORT_AFTER_S, self._abort)

    def _abort(self) -> None:
        if not self.disconnected:
            self.transport.abort()
