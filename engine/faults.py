"""A fault of ours inside one session ends that session, and no other: the beats go on for the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import ParamSpec

from engine.errors import SessionFault
from engine.outputs import Close, Output
from engine.session import Session

P = ParamSpec("P")  # of a session's method

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
