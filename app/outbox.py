"""What waits to be written to one client: the only queue between a session and its socket."""

from __future__ import annotations

import asyncio
from collections import deque

from engine.errors import SlowReader
from engine.events import ServerEvent
from engine.outputs import Close

LIMIT = 512
"""Messages that may wait. A client that reads has none; one that stopped fills it in half a minute."""


class Outbox:
    """Bounded. When a client does not keep up, the session is closed: text with holes in it is worth nothing.

    `put` never blocks and is called by the conductor; one task calls `get`.
    """

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._items: deque[ServerEvent | Close] = deque()
        self._ready = asyncio.Event()
        self.is_closed = False  # a Close is the last item, nothing comes after it

    def put(self, item: ServerEvent | Close) -> None:
        if self.is_closed:
            return
        if isinstance(item, Close):
            self.is_closed = True
        elif len(self._items) >= self._limit:
            self.overflow()
            return
        self._items.append(item)
        self._ready.set()

    def overflow(self) -> None:
        """Give up on the client: what waits is dropped, the close remains."""
        self._items.clear()
        self.put(Close(SlowReader(f"{self._limit} messages waited to be read: read them as they come.")))

    async def get(self) -> ServerEvent | Close:
        while not self._items:
            self._ready.clear()
            await self._ready.wait()
        return self._items.popleft()
