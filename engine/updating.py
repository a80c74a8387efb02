"""A session.update on its way: whether it can be, and what was asked for until it takes effect."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import SessionConfig
from engine.events import Error, SessionUpdated
from engine.models.family import Family
from engine.refusals import instructions_too_long, no_voice, turn_mode_refused
from engine.types import TurnMode

LATER_INSTRUCTIONS_TOKENS = 1024  # of instructions in mid-conversation, which need not fit into a head


@dataclass(frozen=True, slots=True)
class Update:
    """What the client asked for, until nothing runs."""

    mode: TurnMode
    instructions: str
    is_aloud: bool

    def changed(self, mode: TurnMode | None, instructions: str | None, is_aloud: bool | None) -> Update:
        """With what is given; None leaves it as it is."""
        return Update(
            mode or self.mode,
            self.instructions if instructions is None else instructions,
            self.is_aloud if is_aloud is None else is_aloud,
        )

    def event(self, max_tokens: int, voice_rate: int | None) -> SessionUpdated:
        """What the client is told when it takes effect."""
        return SessionUpdated(
            turn=self.mode,
            instructions=self.instructions,
            max_tokens=max_tokens,
            voice=self.is_aloud,
            voice_sample_rate=voice_rate,
        )


def refusal(
    family: Family,
    config: SessionConfig,
    mode: TurnMode | None,
    instructions: str | None,
    is_aloud: bool | None,
    *,
    has_spoken: bool,
) -> Error | None:
    """Why the session cannot be changed so; None where it can. `has_spoken`: the conversation has begun."""
    if mode is not None and mode not in family.info.turn_modes:
        return turn_mode_refused(family, mode)
    if instructions is not None and config.max_head_tokens is not None:
        error = _too_long(family, instructions, config.max_head_tokens, has_spoken)
        if error is not None:
            return error
    return no_voice() if is_aloud and config.voice_rate is None else None


def _too_long(family: Family, instructions: str, cap: int, has_spoken: bool) -> Error | None:
    """The error for instructions that would make a head longer than the engine keeps.

    Later ones are a message like any other, but a session without a length could take in any number.
    """
    num_tokens = len(family.instruct(instructions) if has_spoken else family.head(instructions))
    cap = max(cap, LATER_INSTRUCTIONS_TOKENS) if has_spoken else cap
    return instructions_too_long(num_tokens, cap) if num_tokens > cap else None
