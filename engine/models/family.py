"""The interface of a model family: everything the server must know of a model, and nothing of how it runs.

A family turns audio into tokens (`hear`), knows the conversation's template as token ids, and turns answer
tokens back into text. It does no scheduling and no I/O after `load`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from engine.types import Hearing, Intake, Sampling, TurnMode


@dataclass(frozen=True, slots=True)
class FamilyInfo:
    """The family's constants."""

    name: str  # what `/capacity` and `session.created` report
    budget_s: float  # B: how often a session is due
    max_tokens_per_tick: int  # most tokens one tick may decode for one session
    target_fraction: float  # admission aims at a p50 lateness under this part of B
    turn_modes: tuple[TurnMode, ...]  # offered; the first is the default
    playback_tokens_per_s: float  # tokens a second that speaking the answer uses up
    transcribes: bool  # whether a final Intake carries a transcript
    audio_tokens_per_s: float = 0.0  # placeholders a second of audio takes; 0: it hears words
    refused_modes: dict[TurnMode, str] = field(default_factory=dict)  # mode -> the reason, for people
    checkpoint: str | None = None  # a published one: NAME@COMMIT on the Hub, or its directory


@dataclass(frozen=True, slots=True)
class ItemLayout:
    """What each item of a family's features is like. The engine proves it at its start by encoding some, and
    refuses items that are not so.

    A dimension None is the item's length in frames, the same in all its tensors.
    """

    tensors: Mapping[str, tuple[str, tuple[int | None, ...]]]  # name -> dtype ("float32"), shape
    frames: tuple[int, int]  # of the shortest item and of the longest
    num_tokens: Callable[[int], int]  # embeddings that the encoder makes of so many frames
    values: Mapping[str, Callable[[int], int]]  # tensors of one number, which follows from the frames


@dataclass(frozen=True, slots=True)
class EngineRecipe:
    """What an engine needs to load the family's model."""

    model_dir: Path  # a checkpoint directory (config.json, safetensors, tokenizer)
    max_session_tokens: int  # the length the model was trained for
    dtype: str = "bfloat16"
    modality: str | None = None  # "audio" where works carry features
    layout: ItemLayout | None = None  # of these features
    samplings: tuple[Sampling, ...] = (Sampling(),)  # all ways in which its sessions pick tokens
    load_format: str = "auto"
    overrides: dict[str, Any] = field(default_factory=dict)  # further engine arguments by name


class Detokenizer(Protocol):
    """Incremental: one per answer."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that is now certain; an unfinished UTF-8 sequence is held back."""
        ...

    def flush(self) -> str:
        """What was held back, at the end of an answer."""
        ...


class Family(ABC):
    """One model family. Template methods are pure and cheap; `hear` is heavy and runs off the event loop."""

    info: FamilyInfo

    @abstractmethod
    def engine_recipe(self) -> EngineRecipe: ...

    # the conversation's template, as token ids

    @abstractmethod
    def head(self, instructions: str) -> tuple[int, ...]:
        """The first S tokens: template and instructions, never audio. Kept for ever."""

    @abstractmethod
    def open_turn(self, mode: TurnMode) -> tuple[int, ...]:
        """Before the first intake of a user's turn. In continuous mode each tick's audio is a turn."""

    @abstractmethod
    def close_turn(self, mode: TurnMode) -> tuple[int, ...]:
        """After the last intake of a user's turn; the answer is decoded right behind it."""

    @abstractmethod
    def close_answer(self, mode: TurnMode) -> tuple[int, ...]:
        """After an answer's last token, before what comes next (the engine keeps no stop token)."""

    def close_stopped(self, mode: TurnMode, stop_token: int) -> tuple[int, ...]:
        """As `close_answer`, for an answer that the model ended with this one of its stop tokens."""
        return self.close_answer(mode)

    def is_pause(self, mode: TurnMode, token_ids: Sequence[int], stop_token: int) -> bool:
        """Whether a model that decoded these tokens and stopped has only paused: its answer goes on in the
        next tick (continuous mode)."""
        return False

    @abstractmethod
    def instruct(self, instructions: str) -> tuple[int, ...]:
        """New instructions in the middle of a conversation, between turns."""

    @abstractmethod
    def sampling(self, mode: TurnMode) -> Sampling: ...

    def samplings(self) -> tuple[Sampling, ...]:
        """Those of all its turn modes."""
        return tuple(dict.fromkeys(self.sampling(mode) for mode in self.info.turn_modes))

    @abstractmethod
    def detokenizer(self) -> Detokenizer: ...

    # audio

    @abstractmethod
    def new_ear(self) -> Any:
        """State of one session's hearing; bounded in size; only `hear` touches it."""

    @abstractmethod
    def hear(self, batch: Sequence[Hearing]) -> list[Intake]:
        """Turn the audio of all due sessions into intakes, in order.

        Runs on one worker thread, never twice at once. After a final hearing the ear is as new for the next
        turn. May raise, and then leaves every ear as it was: each hearing is tried again by itself, and one
        that raises alone ends its session, and no other.
        """

    def warm_up(self) -> None:  # noqa: B027 - a hook, not a duty
        """Load what is loaded lazily, so that no caller pays for it. Called once before serving."""
