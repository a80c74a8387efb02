"""The log: one line an event on standard error, as text or as JSON. Ids only, never keys; words if asked."""

from __future__ import annotations

import logging
from typing import Literal

from pythonjsonlogger.json import JsonFormatter

from engine.conductor import Deliver
from engine.events import InputTranscript, ResponseDone, ResponseHeard, ResponseTextDelta
from engine.outputs import ToClient

log = logging.getLogger(__name__)

TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def formatter(kind: Literal["text", "json"]) -> logging.Formatter:
    """JSON has the fields timestamp (UTC), level, logger, message, exc_info, and those given as `extra`."""
    if kind == "text":
        return logging.Formatter(TEXT)
    return JsonFormatter(
        "%(levelname)s %(name)s %(message)s",
        rename_fields={"levelname": "level", "name": "logger"},
        timestamp=True,
    )


def set_up(level: str, kind: Literal["text", "json"]) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(kind))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    # At debug it would write down frames, and URLs with the keys in them; at info two lines for each session.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


class WordLog:
    """Writes down what a session heard and said on its way to the client; only for `log_words`."""

    def __init__(self, session_id: str, deliver: Deliver) -> None:
        self._session_id = session_id
        self._deliver = deliver
        self._answer = ""  # being written

    def __call__(self, item: ToClient) -> None:
        match item:
            case InputTranscript(text=text):
                self._write("heard", text)
            case ResponseTextDelta(delta=delta):
                self._answer += delta
            case ResponseDone(reason=reason):
                self._write(f"said ({reason})", self._answer)
                self._answer = ""
            case ResponseHeard(text=text):
                self._write("was interrupted after", text)
        self._deliver(item)

    def _write(self, what: str, words: str) -> None:
        # As a literal: what people say must not be able to look like a line of the log.
        log.info("session %s %s: %r", self._session_id, what, words, extra={"session": self._session_id})
