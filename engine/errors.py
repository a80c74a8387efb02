"""Everything that can end a session, and what its client is told.

    SessionError
    +-- BadMessage         1007  not JSON
    +-- NotUnderstood      1003  JSON that is no event of ours, too often
    +-- TooBig             1009  a message over the limit
    +-- SlowReader         1008  the client does not read what it is sent
    +-- SessionOver        1000  its time, its length or its silence reached the limit
    +-- Unavailable        1013  no room, retry later (code says why: at_capacity, starting)
    |   +-- Leaving        1001  the server drains
    +-- EngineFailure      1011  the engine died
    +-- SessionFault       1011  the engine refused its work, or a fault of the server's own code

`Unavailable` and `EngineFailure` may carry `retry_after_ms`: the client may try again.
"""

from __future__ import annotations

from engine.events import Error


class SessionError(Exception):
    """Ends one session. The message is for people and says what to do."""

    code = "session_error"
    status = 400
    close_code = 1008

    def __init__(self, message: str, *, code: str | None = None, retry_after_ms: int | None = None) -> None:
        super().__init__(message)
        self.code = code or self.code
        self.retry_after_ms = retry_after_ms

    def event(self) -> Error:
        return Error(
            code=self.code, status=self.status, message=str(self), retry_after_ms=self.retry_after_ms
        )

    def close_reason(self) -> str:
        """The close frame's reason: at most 123 bytes (RFC 6455, 5.5)."""
        return str(self).encode()[:123].decode(errors="ignore")


class BadMessage(SessionError):
    code, status, close_code = "bad_json", 400, 1007


class NotUnderstood(SessionError):
    code, status, close_code = "not_understood", 400, 1003


class TooBig(SessionError):
    code, status, close_code = "too_big", 413, 1009


class SlowReader(SessionError):
    code, status, close_code = "slow_reader", 408, 1008


class SessionOver(SessionError):
    code, status, close_code = "session_over", 410, 1000


class Unavailable(SessionError):
    code, status, close_code = "at_capacity", 503, 1013


class Leaving(Unavailable):
    code, close_code = "draining", 1001


class EngineFailure(SessionError):
    code, status, close_code = "engine_failed", 500, 1011


class SessionFault(SessionError):
    code, status, close_code = "session_failed", 500, 1011

    def __init__(self, message: str = "The session failed by a fault of the server: open a new one.") -> None:
        super().__init__(message)
