"""A real audio-embedding family with random weights: chunks of audio become features inside the prompt.

It runs in continuous mode: each tick's audio is a turn of its own, and the model may answer a few tokens.
Its template is made-up words, one id each; its answers mean nothing, but they depend on the audio.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from engine.models.family import Detokenizer, EngineRecipe, Family, FamilyInfo, ItemLayout
from engine.types import SAMPLE_RATE, Features, Hearing, Intake, Pcm, Sampling, TurnMode
from tests.support import ultravox_checkpoint as checkpoint

BOS, STOP, OPEN, CLOSE, CLOSE_ANSWER, INSTRUCT = 1, 2, 3, 4, 5, 6
_HOP_SAMPLES = 160
_FRAMES_PER_TOKEN = 2 * checkpoint.STACK_FACTOR
_TOKEN_SAMPLES = _HOP_SAMPLES * _FRAMES_PER_TOKEN  # 160 ms
_MAX_ITEM_SAMPLES = 6 * _TOKEN_SAMPLES  # about a second, so that the encoder's cost is even


@dataclass(slots=True)
class _Ear:
    rest: Pcm = field(default_factory=lambda: np.zeros(0, np.float32))  # less than one token's audio


class Words:
    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(f"w{token} " for token in token_ids)

    def flush(self) -> str:
        return ""


class TinyUltravox(Family):
    """Family of the checkpoint in `model_dir` (`ultravox_checkpoint.build`)."""

    def __init__(self, model_dir: Path) -> None:
        from transformers import WhisperFeatureExtractor

        self._model_dir = model_dir
        self._extractor = WhisperFeatureExtractor.from_pretrained(model_dir)
        self.info = FamilyInfo(
            name="tiny-ultravox",
            budget_s=1.0,
            max_tokens_per_tick=4,
            target_fraction=0.3,
            turn_modes=(TurnMode.CONTINUOUS,),
            playback_tokens_per_s=4.0,
            transcribes=False,
            refused_modes={
                TurnMode.SERVER_VAD: "The model listens all the time.",
                TurnMode.MANUAL: "The model listens all the time.",
            },
        )

    def engine_recipe(self) -> EngineRecipe:
        return EngineRecipe(
            model_dir=self._model_dir,
            max_session_tokens=checkpoint.MAX_POSITIONS,
            dtype="float32",
            modality="audio",
            layout=ItemLayout(
                tensors={
                    "audio_features": ("float32", (1, self._extractor.feature_size, None)),
                    "audio_lens": ("int64", (1,)),
                    "audio_token_len": ("int64", (1,)),
                    "audio_num_chunks": ("int64", (1,)),
                },
                frames=(_FRAMES_PER_TOKEN, _MAX_ITEM_SAMPLES // _HOP_SAMPLES),
                num_tokens=lambda num_frames: num_frames // _FRAMES_PER_TOKEN,
                values={
                    "audio_lens": lambda num_frames: num_frames,
                    "audio_token_len": lambda num_frames: num_frames // _FRAMES_PER_TOKEN,
                    "audio_num_chunks": lambda num_frames: 1,
                },
            ),
            overrides={"trust_remote_code": True},  # the processor's few lines lie in the checkpoint
        )

    def head(self, instructions: str) -> tuple[int, ...]:
        return (BOS, *self.instruct(instructions))

    def open_turn(self, mode: TurnMode) -> tuple[int, ...]:
        return (OPEN,)

    def close_turn(self, mode: TurnMode) -> tuple[int, ...]:
        return (CLOSE,)

    def close_answer(self, mode: TurnMode) -> tuple[int, ...]:
        return (CLOSE_ANSWER,)

    def instruct(self, instructions: str) -> tuple[int, ...]:
        return (INSTRUCT, *(7 + sum(word.encode()) % 200 for word in instructions.split()))

    def sampling(self, mode: TurnMode) -> Sampling:
        return Sampling(stop_token_ids=(STOP,))

    def detokenizer(self) -> Detokenizer:
        return Words()

    def new_ear(self) -> _Ear:
        return _Ear()

    def hear(self, batch: Sequence[Hearing]) -> list[Intake]:
        return [self._hear_one(hearing) for hearing in batch]

    def _hear_one(self, hearing: Hearing) -> Intake:
        """Whole tokens only: an item that ends inside one would hear, in Ultravox's last stack of frames,
        how long the others in its encoder batch are."""
        ear: _Ear = hearing.ear
        audio = np.concatenate([ear.rest, hearing.audio])
        if hearing.is_final:
            audio = np.pad(audio, (0, -len(audio) % _TOKEN_SAMPLES))
        num_samples = len(audio) - len(audio) % _TOKEN_SAMPLES
        if not np.isfinite(audio).all():
            return Intake()
        tokens: list[int] = []
        features: list[Features] = []
        for start in range(0, num_samples, _MAX_ITEM_SAMPLES):
            item = self._features(audio[start : min(start + _MAX_ITEM_SAMPLES, num_samples)], len(tokens))
            tokens.extend([checkpoint.AUDIO_TOKEN_ID] * item.num_tokens)
            features.append(item)
        ear.rest = audio[num_samples:]
        return Intake(tuple(tokens), tuple(features))

    def _features(self, audio: Pcm, offset: int) -> Features:
        import torch

        mel = self._extractor(
            audio, sampling_rate=SAMPLE_RATE, padding="longest", truncation=False, return_tensors="pt"
        )["input_features"]
        num_frames = len(audio) // _HOP_SAMPLES
        num_tokens = num_frames // _FRAMES_PER_TOKEN
        return Features(
            offset=offset,
            num_tokens=num_tokens,
            tensors={
                "audio_features": mel,  # [1, mel bins, frames]
                "audio_lens": torch.tensor([num_frames]),
                "audio_token_len": torch.tensor([num_tokens]),
                "audio_num_chunks": torch.tensor([1]),
            },
        )
