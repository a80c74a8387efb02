"""A fault of ours inside one session ends that session, and no other: the beats go on for the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from engine.errors import SessionFault
from engine.outputs import Close, Output
from engine.session import Session

P = ParamSpec("P")  # of a session's method
Item = TypeVar("Item")
Made = TypeVar("Made")

log = logging.getLogger(__name__)


def fault(session: Session) -> Close:
    """The end of a session one of whose methods has raised. Call it where the exception is caught."""
    log.exception("session %s failed", session.id, extra={"session": session.id})
    session.tally.faults += 1
    return Close(SessionFault())


def contained(
    session: Session, method: Callable[P, Sequence[Output]], *args: P.args, **kwargs: P.kwargs
) -> Sequence[Output]:
    """What a session's method returns, or the session's end if it raises."""
    try:
        return method(*args, **kwargs)
    except Exception:
        return [fault(session)]


def all_or_each(
    make: Callable[[list[Item]], Sequence[Made]], batch: list[Item], failed: Callable[[list[Item]], str]
) -> list[Made | None]:
    """What `make` makes of a batch of sessions' items; where it fails, of each by itself, None where it fails
    again. `failed` says it to the log."""
    try:
        made = [*make(batch)]
        if len(made) != len(batch):
            raise RuntimeError(f"{len(made)} results came of {len(batch)} items")
        return [*made]
    except Exception:
        log.exception("%s", failed(batch))
        return [None] if len(batch) == 1 else [all_or_each(make, [item], failed)[0] for item in batch]
