"""Who stands at the socket: origin, key, and the places of that key. The gate behind it counts load.

A key is looked for in the Authorization header, then in `?key=` (the last resort: URLs end up in the logs of
proxies), then, since a browser can set no header, in a first message `{"type": "auth", "key": ...}`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator

from fastapi import WebSocket
from starlette.requests import HTTPConnection
from starlette.websockets import WebSocketDisconnect

from app.auth import ApiKey, KeyInUse, Keyring, NotAllowed, WrongOrigin, bearer, is_allowed_origin
from app.settings import AuthSettings
from app.wire import Auth, UnknownMessage, parse
from engine.errors import BadMessage, SessionError, Unavailable

RETRY_MS = 5000
HOW = 'send "Authorization: Bearer KEY", or {"type": "auth", "key": KEY} as the first message'


class Door:
    """Used from the event loop only. `refused` counts by error code."""

    def __init__(self, keyring: Keyring, settings: AuthSettings, refused: Counter[str]) -> None:
        self.keyring = keyring
        self.num_pending = 0  # connected, and their key has not come yet
        self._settings = settings
        self._origins = settings.allowed_origins
        self._refused = refused
        self._sessions: Counter[str] = Counter()  # by key name

    async def identify(self, socket: WebSocket) -> ApiKey | None:
        """Whose socket this is, None on an open server. Raises SessionError for those who may not enter."""
        with self._counting():
            origin = socket.headers.get("origin")
            if not is_allowed_origin(origin, socket.headers.get("host", ""), self._origins):
                raise WrongOrigin(
                    "Pages of this origin may not use this server (auth.origins lists who may)."
                )
            if self.keyring.is_open:
                return None
            candidate = presented_key(socket)
            if candidate is None:
                candidate = await self._first_message(socket)
            key = self.keyring.find(candidate)
            if key is None:
                raise NotAllowed("The API key is not known here.")
            return key

    @contextlib.contextmanager
    def place(self, key: ApiKey | None) -> Iterator[None]:
        """One of the key's sessions, while the context lasts."""
        if key is None:
            yield
            return
        with self._counting():
            if key.max_sessions is not None and self._sessions[key.name] >= key.max_sessions:
                raise KeyInUse(
                    f"All {key.max_sessions} sessions of the key {key.name} are running.",
                    retry_after_ms=RETRY_MS,
                )
        self._sessions[key.name] += 1
        try:
            yield
        finally:
            self._sessions[key.name] -= 1

    def lets_in(self, request: HTTPConnection) -> bool:
        """Whether an HTTP request may see what needs a key."""
        candidate = presented_key(request)
        return self.keyring.is_open or (candidate is not None and self.keyring.find(candidate) is not None)

    async def _first_message(self, socket: WebSocket) -> str:
        if self.num_pending >= self._settings.max_pending:
            raise Unavailable(
                "Too many connections wait for their key.", code="too_many_pending", retry_after_ms=RETRY_MS
            )
        self.num_pending += 1
        try:
            async with asyncio.timeout(self._settings.deadline_s):
                message = await socket.receive()
        except TimeoutError:
            raise NotAllowed(f"No key came within {self._settings.deadline_s:g} s: {HOW}.") from None
        finally:
            self.num_pending -= 1
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message["code"])
        with contextlib.suppress(BadMessage, UnknownMessage):
            if isinstance(auth := parse(message.get("text") or ""), Auth):
                return auth.key.get_secret_value()
        raise NotAllowed(f"This server needs an API key: {HOW}.")

    @contextlib.contextmanager
    def _counting(self) -> Iterator[None]:
        try:
            yield
        except SessionError as error:
            self._refused[error.code] += 1
            raise


def presented_key(connection: HTTPConnection) -> str | None:
    """What header or query hold; None when neither does."""
    header = bearer(connection.headers.get("authorization"))
    return header if header is not None else connection.query_params.get("key")
