"""Qwen2.5-Omni (7B, 3B) and Qwen3-Omni-30B-A3B: the thinker alone, from the published checkpoints.

It hears audio as embeddings and answers in text; the talker's weights are not loaded. The template is ChatML,
a user's turn holds one audio item: bos, a placeholder for each token the encoder makes, eos. A turn's audio
is encoded in blocks of 2 s as it arrives, each once, and the placeholders of all its blocks stand in one row:
token for token the prompt of the whole turn (what the blocks' borders change is in the families' notes).

Positions: the thinker's M-RoPE gives each token three of them, which differ in images and videos only. Here
they never do, and then M-RoPE is RoPE; so the engine is told of plain RoPE (`plain_rope`), and no position
depends on what else a session holds.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from engine.audio.resample import limited
from engine.models.family import Detokenizer, EngineRecipe, Family, FamilyInfo, ItemLayout
from engine.models.published import checkpoint_name, read_config
from engine.models.qwen_tokenizer import load_tokenizer
from engine.models.text import TextCodec
from engine.types import SAMPLE_RATE, Features, Hearing, Intake, Pcm, Sampling, TurnMode

if TYPE_CHECKING:
    from engine.models.log_mel import LogMel

BLOCK_SAMPLES = 2 * SAMPLE_RATE
"""What is encoded at once: Qwen2.5-Omni's own block, and two of Qwen3-Omni's convolutions."""

SHORT_SAMPLES = SAMPLE_RATE // 2
"""Continuous mode: less than this behind a whole block waits for the next tick, which comes with it."""

_NOTHING: Pcm = np.zeros(0, np.float32)


@dataclass(slots=True)
class Ear:
    """Audio that waits for its block to fill: less than one, between two hearings."""

    rest: Pcm = field(default_factory=lambda: _NOTHING)


class QwenOmni(Family):
    """What both generations share."""

    audio_tokens: ClassVar[tuple[str, str, str]]  # before an audio item, of it, behind it
    default_instructions: ClassVar[str]
    token_samples: ClassVar[int]  # of a token; a part that ends between blocks is cut to whole ones
    audio_tokens_per_s: ClassVar[int]
    sampling_defaults: ClassVar[Sampling]

    def __init__(self, model_dir: Path, *, device: str = "cpu") -> None:
        """`model_dir` is a checkpoint as published; the features are computed on `device`."""
        self._model_dir = model_dir
        self._device = device
        thinker = read_config(model_dir).get("thinker_config", {})
        self._text: dict[str, Any] = thinker.get("text_config", {})
        self._dtype = str(thinker.get("dtype") or thinker.get("torch_dtype") or "bfloat16")
        self._codec = TextCodec(load_tokenizer(model_dir))
        self._start, self._end, self._end_of_text = map(
            self._codec.special, ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
        )
        self._audio_bos, self._audio_pad, self._audio_eos = map(self._codec.special, self.audio_tokens)
        self._newline = self._codec.encode("\n")
        self._user = (self._start, *self._codec.encode("user\n"), self._audio_bos)
        self._turn_end = (self._audio_eos, self._end, *self._newline)
        self._assistant = (self._start, *self._codec.encode("assistant\n"))
        self.info = FamilyInfo(
            name=self._name(),
            budget_s=2.0,
            max_tokens_per_tick=20,
            target_fraction=0.3,
            turn_modes=(TurnMode.SERVER_VAD, TurnMode.MANUAL, TurnMode.CONTINUOUS),
            playback_tokens_per_s=4.0,  # unhurried speech: 3 words a second
            transcribes=False,
            audio_tokens_per_s=self.audio_tokens_per_s,
            checkpoint=checkpoint_name(model_dir),
        )

    @abstractmethod
    def _name(self) -> str: ...

    @abstractmethod
    def num_tokens(self, num_frames: int) -> int:
        """Tokens that the encoder makes of one item's frames."""

    @abstractmethod
    def _make_mel(self) -> LogMel: ...

    @abstractmethod
    def _ended(self, rest: Pcm) -> Pcm:
        """A turn's last part as the encoder takes it; empty where it is too short to be heard."""

    def engine_recipe(self) -> EngineRecipe:
        return EngineRecipe(
            model_dir=self._model_dir,
            max_session_tokens=int(self._text.get("max_position_embeddings", 32_768)),
            dtype=self._dtype,
            modality="audio",
            layout=ItemLayout(
                tensors={
                    "input_audio_features": ("float32", (128, None)),
                    "feature_attention_mask": ("int32", (1, None)),
                    "audio_feature_lengths": ("int64", (1,)),
                },
                frames=(3, BLOCK_SAMPLES // 160),
                num_tokens=self.num_tokens,
                values={"audio_feature_lengths": lambda num_frames: num_frames},
            ),
            samplings=self.samplings(),
            overrides={"hf_overrides": plain_rope},
        )

    # the conversation's template

    def head(self, instructions: str) -> tuple[int, ...]:
        """The system message: it ends before the first user's turn, so no audio is in it."""
        return self.instruct(instructions)

    def open_turn(self, mode: TurnMode) -> tuple[int, ...]:
        return self._user

    def close_turn(self, mode: TurnMode) -> tuple[int, ...]:
        return self._turn_end + self._assistant

    def close_answer(self, mode: TurnMode) -> tuple[int, ...]:
        return (self._end, *self._newline)

    def instruct(self, instructions: str) -> tuple[int, ...]:
        text = instructions.strip() or self.default_instructions
        return (self._start, *self._codec.encode(f"system\n{text}"), self._end, *self._newline)

    def sampling(self, mode: TurnMode) -> Sampling:
        return self._sampling

    @cached_property
    def _sampling(self) -> Sampling:
        return replace(self.sampling_defaults, stop_token_ids=(self._end, self._end_of_text))

    def detokenizer(self) -> Detokenizer:
        return self._codec.detokenizer()

    # audio

    def new_ear(self) -> Ear:
        return Ear()

    def warm_up(self) -> None:
        self._mel([np.zeros(BLOCK_SAMPLES, np.float32)])

    def hear(self, batch: Sequence[Hearing]) -> list[Intake]:
        taken = [self._take(hearing) for hearing in batch]
        mels = iter(self._mel([part for parts, _ in taken for part in parts]))
        intakes = [self._intake([self._item(next(mels)) for _ in parts]) for parts, _ in taken]
        for hearing, (_, rest) in zip(batch, taken, strict=True):
            hearing.ear.rest = rest  # only now: nothing can fail any more
        return intakes

    @cached_property
    def _mel(self) -> LogMel:
        return self._make_mel()  # late: it imports torch

    def _take(self, hearing: Hearing) -> tuple[list[Pcm], Pcm]:
        """Parts of at most a block to be encoded now; what waits for more audio."""
        ear: Ear = hearing.ear
        audio = limited(hearing.audio)
        if len(ear.rest):
            audio = np.concatenate([ear.rest, audio])
        end = len(audio) - len(audio) % BLOCK_SAMPLES
        parts = [audio[start : start + BLOCK_SAMPLES] for start in range(0, end, BLOCK_SAMPLES)]
        rest = audio[end:]
        if hearing.mode is TurnMode.CONTINUOUS:
            if not parts or len(rest) >= SHORT_SAMPLES:
                num = len(rest) - len(rest) % SAMPLE_RATE % self.token_samples
                parts += [rest[:num]] if num else []
                rest = rest[num:]
        elif hearing.is_final:
            last, rest = self._ended(rest), _NOTHING
            parts += [last] if len(last) else []
        return parts, rest.copy()

    def _item(self, mel: Any) -> Features:
        import torch

        num_frames = mel.shape[1]
        return Features(
            offset=0,
            num_tokens=self.num_tokens(num_frames),
            tensors={
                "input_audio_features": mel,  # [mel bins, frames]
                "feature_attention_mask": torch.ones((1, num_frames), dtype=torch.int32),
                "audio_feature_lengths": torch.tensor([num_frames]),
            },
        )

    def _intake(self, items: Sequence[Features]) -> Intake:
        placed: list[Features] = []
        num_tokens = 0
        for item in items:
            placed.append(Features(num_tokens, item.num_tokens, item.tensors))
            num_tokens += item.num_tokens
        return Intake((self._audio_pad,) * num_tokens, tuple(placed))


class Qwen25Omni(QwenOmni):
    """25 tokens a second. The encoder's convolutions, positions and attention stay in blocks of 200 frames
    (Qwen2.5-Omni report, arXiv 2503.20215, section 2.2), so blocks encoded one by one equal the whole."""

    audio_tokens = ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
    # The chat template's own (transformers, tests/models/qwen2_5_omni/test_processing_qwen2_5_omni.py). The
    # model card's longer one ("You are Qwen, a virtual human ...") is what its own speech output needs.
    default_instructions = "You are a helpful assistant."
    token_samples = 640
    audio_tokens_per_s = 25
    sampling_defaults = Sampling()  # greedy, as transformers' `generate`: it samples in the talker only

    def _name(self) -> str:
        size = {3584: "-7b", 2048: "-3b"}.get(self._text.get("hidden_size", 0), "")
        return f"qwen2.5-omni{size}"

    def num_tokens(self, num_frames: int) -> int:
        return ((num_frames - 1) // 2 + 1 - 2) // 2 + 1

    def _make_mel(self) -> LogMel:
        from engine.models.log_mel import Ending, LogMel

        return LogMel(128, Ending.SILENCE, self._device)

    def _ended(self, rest: Pcm) -> Pcm:
        is_heard = self.num_tokens(-(-len(rest) // 160)) > 0  # from 21 ms on
        return rest if is_heard else _NOTHING


class Qwen3Omni(QwenOmni):
    """13 tokens a second. Convolutions and positions stay inside blocks of 100 frames, attention reaches over
    up to 8 s; the encoder was trained with windows of 1 to 8 s for streaming (Qwen3-Omni report, arXiv
    2509.17765, section 2.2). So blocks of 2 s are its short window, and differ from encoding the whole."""

    audio_tokens = ("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>")
    # Its chat template has none; QwenLM/Qwen3-Omni's README recommends a prompt of 200 words for speech.
    default_instructions = (
        "You are a voice assistant talking with a person. Answer in one or two short spoken sentences."
    )
    token_samples = 1280
    audio_tokens_per_s = 13
    sampling_defaults = Sampling(temperature=0.6, top_p=0.95, top_k=20)  # QwenLM/Qwen3-Omni, README, vLLM

    def _name(self) -> str:
        return "qwen3-omni-30b-a3b" if self._text.get("num_hidden_layers") == 48 else "qwen3-omni"

    def num_tokens(self, num_frames: int) -> int:
        seconds, frames = divmod(num_frames, 100)
        return 13 * seconds + -(-frames // 8)

    def _make_mel(self) -> LogMel:
        from engine.models.log_mel import Ending, LogMel

        return LogMel(128, Ending.MIRROR, self._device)

    def _ended(self, rest: Pcm) -> Pcm:
        """Up to a whole frame, as vLLM pads it; its mirror needs more than half a window."""
        return np.pad(rest, (0, -len(rest) % 160)) if len(rest) > 320 else _NOTHING


def plain_rope(config: Any) -> Any:
    """`hf_overrides`: the thinker's three positions are one, where it neither sees images nor videos."""
    thinker = getattr(config, "thinker_config", None)
    if thinker is None:
        return config  # vLLM asks once with an empty one
    text = thinker.text_config
    for name in ("rope_parameters", "rope_scaling"):
        rope = getattr(text, name, None)
        if isinstance(rope, dict):
            for key in ("mrope_section", "mrope_interleaved", "interleaved"):
                rope.pop(key, None)
    return config
