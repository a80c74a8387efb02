"""A family without a model: bytes are its tokens, and all it hears is how long the audio was.

For work on the front end, and for tests that need every turn mode at once; imports neither torch nor vllm.
Goes with `engine.null.NullEngine`, which echoes the bytes of the user's turn.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.models.family import EngineRecipe, Family, FamilyInfo
from engine.types import SAMPLE_RATE, Hearing, Intake, Sampling, TurnMode

HEAD, OPEN, CLOSE, END = 256, 257, 258, 259
"""Template tokens; ids below 256 are bytes of UTF-8."""


def encode(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


@dataclass(slots=True)
class NullEar:
    num_samples: int = 0  # heard in this turn


class NullDetokenizer:
    """Bytes to text; template tokens have none."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(bytes(t for t in token_ids if t < 256))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class NullFamily(Family):
    """Every turn mode; a final hearing becomes "heard 1234 ms"."""

    def __init__(self, budget_s: float = 2.0, max_tokens_per_tick: int = 64) -> None:
        self.info = FamilyInfo(
            name="null",
            budget_s=budget_s,
            max_tokens_per_tick=max_tokens_per_tick,
            target_fraction=0.3,
            turn_modes=(TurnMode.SERVER_VAD, TurnMode.MANUAL, TurnMode.CONTINUOUS),
            playback_tokens_per_s=15.0,  # speech runs at about 15 characters a second
            transcribes=True,
        )

    def engine_recipe(self) -> EngineRecipe:
        """Nothing to load; only the length means something."""
        return EngineRecipe(model_dir=Path("null"), max_session_tokens=8192)

    def head(self, instructions: str) -> tuple[int, ...]:
        return (HEAD, *encode(instructions), END)

    def instruct(self, instructions: str) -> tuple[int, ...]:
        return self.head(instructions)

    def open_turn(self, mode: TurnMode) -> tuple[int, ...]:
        return (OPEN,)

    def close_turn(self, mode: TurnMode) -> tuple[int, ...]:
        return (CLOSE,)

    def close_answer(self, mode: TurnMode) -> tuple[int, ...]:
        return (END,)

    def sampling(self, mode: TurnMode) -> Sampling:
        return Sampling(stop_token_ids=(END,))

    def detokenizer(self) -> NullDetokenizer:
        return NullDetokenizer()

    def new_ear(self) -> NullEar:
        return NullEar()

    def hear(self, batch: Sequence[Hearing]) -> list[Intake]:
        return [self._hear_one(hearing) for hearing in batch]

    @staticmethod
    def _hear_one(hearing: Hearing) -> Intake:
        ear: NullEar = hearing.ear
        ear.num_samples += len(hearing.audio)
        if not hearing.is_final:
            return Intake()
        heard_ms, ear.num_samples = 1000 * ear.num_samples // SAMPLE_RATE, 0
        if heard_ms == 0:
            return Intake(transcript="")
        text = f"heard {heard_ms} ms"
        return Intake(token_ids=encode(text), transcript=text)
