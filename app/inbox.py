"""What one client sends, message by message, and what its session makes of it."""

from __future__ import annotations

import time

from app.limits import MessageRate
from app.outbox import Outbox
from app.service import Service
from app.wire import (
    Auth,
    InputCommit,
    Ping,
    ResponseCancel,
    ResponsePlayed,
    SessionUpdate,
    UnknownMessage,
    parse,
)
from engine.errors import NotUnderstood, SessionError, TooBig
from engine.events import Error, Pong
from engine.faults import fault
from engine.outputs import Close
from engine.session import Session

MAX_UNKNOWN_MESSAGES = 20  # then the client is not one of ours


class Inbox:
    """Takes messages in the order in which they came, at once; a wrong one is answered through the outbox.

    Belongs to the event loop. Neither method raises, for nothing a client can send and by no fault of ours.
    """

    def __init__(self, session: Session, outbox: Outbox, service: Service) -> None:
        self._session = session
        self._outbox = outbox
        self._conductor = service.conductor
        self._limit_bytes = session.config.max_message_bytes
        self._rate = MessageRate(service.settings.session.max_messages_per_s, time.monotonic())
        self._num_unknown = 0

    def on_audio(self, data: bytes) -> None:
        """A binary message: PCM s16le mono of any length."""
        if self._outbox.is_closed:
            return
        now = time.monotonic()
        try:
            self._count(len(data), now)
            if outputs := self._session.on_audio(data, now):  # mostly none: it only waits for its tick
                self._conductor.carry_out(self._session, outputs)
        except SessionError as error:
            self._outbox.put(Close(error))
        except Exception:
            self._outbox.put(fault(self._session))

    def on_text(self, text: str) -> None:
        """A text message: JSON with a `type`."""
        if self._outbox.is_closed:
            return
        now = time.monotonic()
        try:
            self._count(len(text), now)
            self._take(text, now)
        except UnknownMessage as error:
            self._num_unknown += 1
            self._outbox.put(Error(code="not_understood", status=400, message=str(error)))
            if self._num_unknown >= MAX_UNKNOWN_MESSAGES:
                self._outbox.put(Close(NotUnderstood(f"{self._num_unknown} messages were not understood.")))
        except SessionError as error:
            self._outbox.put(Close(error))
        except Exception:
            self._outbox.put(fault(self._session))

    def _count(self, size: int, now: float) -> None:
        self._rate.count(now)
        if size > self._limit_bytes:
            raise TooBig(
                f"A message was larger than {self._limit_bytes} bytes: send audio in smaller pieces."
            )

    def _take(self, text: str, now: float) -> None:
        match parse(text):
            case SessionUpdate(turn=turn, instructions=instructions, max_tokens=max_tokens, voice=voice):
                outputs = self._session.on_update(turn, instructions, max_tokens, voice)
            case InputCommit():
                outputs = self._session.on_commit(now)
            case ResponseCancel():
                outputs = self._session.on_cancel(now)
            case ResponsePlayed(response_id=response_id, played_ms=played_ms):
                outputs = self._session.on_played(response_id, played_ms, now)
            case Ping():
                self._outbox.put(Pong())
                return
            case Auth():
                return  # who this is was settled before the session began
        self._conductor.carry_out(self._session, outputs)
