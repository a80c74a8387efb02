"""Errors that leave the session going: what was asked for cannot be, and what to do instead."""

from __future__ import annotations

from engine.events import Error
from engine.models.family import Family
from engine.types import TurnMode


def wrong_turn_mode(mode: TurnMode) -> Error:
    """For a commit in a session that does not wait for one."""
    message = f"input.commit needs turn mode manual; this session's is {mode}."
    return Error(code="wrong_turn_mode", status=409, message=message)


def input_empty() -> Error:
    message = "Nothing was heard in the committed audio: send speech before input.commit."
    return Error(code="input_empty", status=400, message=message)


def instructions_too_long(num_tokens: int, limit: int) -> Error:
    message = f"The instructions make a head of {num_tokens} tokens, and {limit} are kept: shorten them."
    return Error(code="instructions_too_long", status=400, message=message)


def no_voice() -> Error:
    return Error(code="no_voice", status=409, message="This server has no voice: answers come as text only.")


def turn_mode_refused(family: Family, mode: TurnMode) -> Error:
    """For a turn mode that the family does not offer."""
    reason = family.info.refused_modes.get(mode, f"{family.info.name} does not offer it")
    offered = ", ".join(family.info.turn_modes)
    message = f"Turn mode {mode} is refused: {reason}. Offered: {offered}."
    return Error(code="turn_mode_refused", status=400, message=message)
