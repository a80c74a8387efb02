"""The nouns of a frame's way: Hearing -> Intake -> Work -> Result.

A session's audio becomes a `Hearing` (its new PCM); the model family turns a batch of hearings into
`Intake`s (token ids, maybe with ready-made features); the session wraps each intake in its conversation's
template, which gives `Work` for the engine; the engine answers with `Result`s.
All are immutable; times are seconds of `time.monotonic()`, audio is float32 mono at `SAMPLE_RATE`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

SAMPLE_RATE = 16_000
"""Samples a second of all audio inside the server; sockets resample on the way in."""

Pcm = npt.NDArray[np.float32]
"""Audio samples in [-1, 1], shape [num_samples]."""


class TurnMode(enum.StrEnum):
    """Who decides that the user has finished (design.md, Turns)."""

    CONTINUOUS = "continuous"
    SERVER_VAD = "server_vad"
    MANUAL = "manual"


@dataclass(frozen=True, slots=True)
class Features:
    """Ready-made encoder input of one audio item inside `Work.token_ids`."""

    offset: int  # index in the work's token_ids of the item's first placeholder token
    num_tokens: int  # placeholder tokens the item covers
    tensors: Mapping[str, Any]  # torch tensors by the model's own argument names; shapes are the family's


@dataclass(frozen=True, slots=True)
class Hearing:
    """One session's audio that is due, as the family gets it."""

    session_id: str
    ear: Any  # the family's state for this session (`Family.new_ear`); touched by `Family.hear` only
    audio: Pcm  # new samples since the last hearing; may be empty when `is_final`
    is_final: bool  # the user's turn ends with this audio
    mode: TurnMode = TurnMode.SERVER_VAD  # continuous: every hearing is final, and the audio goes on


@dataclass(frozen=True, slots=True)
class Intake:
    """What a hearing became. No tokens: nothing worth the model's time was said (yet)."""

    token_ids: tuple[int, ...] = ()  # to append; template tokens around them are added later
    features: tuple[Features, ...] = ()  # offsets count from token_ids[0]
    transcript: str | None = None  # the whole turn's words, with a final hearing of a family that transcribes


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the engine picks tokens."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()  # end an answer; never part of a Result's token_ids


@dataclass(frozen=True, slots=True)
class Work:
    """One session's part of a batch: tokens to append, and how many it may decode after them.

    An engine holds at most one unfinished work per session; a generation's first work creates its state.
    """

    session_id: str
    generation: int  # grows whenever the session's engine state starts anew; stale results are dropped by it
    seq: int  # grows with each work of the session; its results carry it
    token_ids: tuple[int, ...]  # never empty
    features: tuple[Features, ...] = ()  # offsets count from token_ids[0]
    num_head_tokens: int = 0  # S: the first tokens of the conversation that are kept for ever
    keep_tokens: int | None = None  # first forget all computed beyond (counts as `Result.num_kv_tokens`)
    max_tokens: int = 0  # tokens to decode; 0 only takes the tokens in
    sampling: Sampling = Sampling()


class Finish(enum.StrEnum):
    """Why a work ended."""

    FED = "fed"  # tokens taken in, nothing was to be decoded
    STOP = "stop"  # the model stopped
    LENGTH = "length"  # max_tokens decoded
    CANCELLED = "cancelled"  # `Engine.cancel`; the work's tokens were taken in, the session's state lives on
    REFUSED = "refused"  # the work could not be run (see Result.error); the session's state is gone


@dataclass(frozen=True, slots=True)
class Result:
    """What one engine step did for one session.

    The last token of a finished work is not in the KV cache: unless it was a stop token (which is not
    reported), the session's next work must begin with it.
    """

    session_id: str
    generation: int
    seq: int
    token_ids: tuple[int, ...]  # newly decoded, stop token excluded
    finish: Finish | None  # set on the work's last result
    num_kv_tokens: int  # tokens the session has computed so far, those since evicted counted
    error: str | None = None  # a sentence for people, with Finish.REFUSED
    stop_token: int | None = None  # which one ended the answer, with Finish.STOP, where the engine knows


@dataclass(frozen=True, slots=True)
class Utterance:
    """One clause of an answer, to be spoken."""

    session_id: str
    response_id: str
    seq: int  # grows with each of the answer's clauses
    text: str
    needed_at: float  # when the sound before it will have been played
