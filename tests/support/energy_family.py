"""A family that hears loudness: every 160 ms of audio is one token, louder ones have higher ids.

Goes with tests/support/tiny_llama.py, so a real engine runs without a recogniser. All turn modes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.models.family import EngineRecipe, Family, FamilyInfo
from engine.types import SAMPLE_RATE, Hearing, Intake, Pcm, Sampling, TurnMode
from tests.support.ultravox_family import Words

BOS, STOP, OPEN, CLOSE, CLOSE_ANSWER, INSTRUCT = 1, 2, 3, 4, 5, 6
FIRST_LEVEL, NUM_LEVELS = 16, 64
TOKEN_SAMPLES = SAMPLE_RATE * 160 // 1000


@dataclass(slots=True)
class EnergyEar:
    rest: Pcm = field(default_factory=lambda: np.zeros(0, np.float32))  # less than one token's audio


class EnergyFamily(Family):
    def __init__(self, recipe: EngineRecipe, budget_s: float = 1.0) -> None:
        self._recipe = recipe
        self.info = FamilyInfo(
            name="energy",
            budget_s=budget_s,
            max_tokens_per_tick=8,
            target_fraction=0.3,
            turn_modes=(TurnMode.SERVER_VAD, TurnMode.MANUAL, TurnMode.CONTINUOUS),
            playback_tokens_per_s=8.0,
            transcribes=False,
            audio_tokens_per_s=SAMPLE_RATE / TOKEN_SAMPLES,
        )

    def engine_recipe(self) -> EngineRecipe:
        return self._recipe

    def head(self, instructions: str) -> tuple[int, ...]:
        return (BOS, *self.instruct(instructions))

    def instruct(self, instructions: str) -> tuple[int, ...]:
        return (INSTRUCT, *(100 + sum(word.encode()) % 100 for word in instructions.split()))

    def open_turn(self, mode: TurnMode) -> tuple[int, ...]:
        return (OPEN,)

    def close_turn(self, mode: TurnMode) -> tuple[int, ...]:
        return (CLOSE,)

    def close_answer(self, mode: TurnMode) -> tuple[int, ...]:
        return (CLOSE_ANSWER,)

    def sampling(self, mode: TurnMode) -> Sampling:
        return Sampling(stop_token_ids=(STOP,))

    def detokenizer(self) -> Words:
        return Words()

    def new_ear(self) -> EnergyEar:
        return EnergyEar()

    def hear(self, batch: Sequence[Hearing]) -> list[Intake]:
        return [self._hear_one(hearing) for hearing in batch]

    @staticmethod
    def _hear_one(hearing: Hearing) -> Intake:
        ear: EnergyEar = hearing.ear
        audio = np.concatenate([ear.rest, hearing.audio])
        if hearing.is_final:
            audio = np.pad(audio, (0, -len(audio) % TOKEN_SAMPLES))
        num_tokens = len(audio) // TOKEN_SAMPLES
        ear.rest = audio[num_tokens * TOKEN_SAMPLES :]
        pieces = audio[: num_tokens * TOKEN_SAMPLES].reshape(num_tokens, TOKEN_SAMPLES)
        loudness = np.sqrt(np.mean(np.square(pieces, dtype=np.float64), axis=1))
        levels = np.clip(NUM_LEVELS * np.nan_to_num(loudness), 0, NUM_LEVELS - 1).astype(int)
        return Intake(tuple((FIRST_LEVEL + levels).tolist()))
