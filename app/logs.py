"""The log: one line an event on standard error, as text or as JSON. Ids only, never words or keys."""

from __future__ import annotations

import logging
from typing import Literal

from pythonjsonlogger.json import JsonFormatter

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
