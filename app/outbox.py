"""What waits to be written to one client: the only queue between a session and its socket."""

from __future__ import annotations

import asyncio
from collections import deque

from engine.errors import SlowReader
from engine.events import ResponseAudioDone, ResponseFlush
from engine.outputs import Close, Sound, ToClient

LIMIT = 512
"""Messages that may wait. A client that reads has none; one that stopped fills it in half a minute."""

LIMIT_BYTES = 2 << 20
"""Of sound that may wait: over 40 s. A session sends some 10 s ahead of playback (voice/mouth.py); a client
that keeps reading never comes near it."""


class Outbox:
    """Bounded. When a client does not keep up, the session is closed: text with holes in it is worth nothing.

    Sound of an interrupted answer is dropped as soon as its flush comes. `put` never blocks and is called by
    the conductor; one task calls `get`.
    """

    def __init__(self, limit: int = LIMIT, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._items: deque[ToClient] = deque()
        self._num_bytes = 0  # of sound
        self._ready = asyncio.Event()
        self.is_closed = False  # a Close is the last item, nothing comes after it

    def put(self, item: ToClient) -> None:
        if self.is_closed:
            return
        if isinstance(item, Close):
            self.is_closed = True
        elif isinstance(item, ResponseFlush):
            self._drop_sound(item.response_id)
        if isinstance(item, Sound):
            self._num_bytes += len(item.pcm)
        is_full = len(self._items) >= self._limit or self._num_bytes > self._limit_bytes
        if is_full and not self.is_closed:
            self.overflow()
            return
        self._items.append(item)
        self._ready.set()

    def overflow(self) -> None:
        """Give up on the client: what waits is dropped, the close remains."""
        seconds = self._num_bytes / 48_000
        what = f"{len(self._items)} messages and {seconds:.0f} s of sound waited to be read"
        self._items.clear()
        self._num_bytes = 0
        self.put(Close(SlowReader(f"{what}: read them as they come.")))

    async def get(self) -> ToClient:
        while not self._items:
            self._ready.clear()
            await self._ready.wait()
        item = self._items.popleft()
        if isinstance(item, Sound):
            self._num_bytes -= len(item.pcm)
        return item

    def _drop_sound(self, response_id: str) -> None:
        kept: deque[ToClient] = deque()
        for item in self._items:
            if isinstance(item, Sound) and item.event.response_id == response_id:
                self._num_bytes -= len(item.pcm)
            elif isinstance(item, ResponseAudioDone) and item.response_id == response_id:
                pass  # it was not
            else:
                kept.append(item)
        self._items = kept
