"""MiniCPM-o 4.5 and 2.6, without eyes and without their own voice: they hear seconds, and answer in text.

A second of audio is an item of its own, 10 tokens (4.5) or 25 (2.6). Templates and sampling are those of the
published streaming code (openbmb/MiniCPM-o-4_5 and openbmb/MiniCPM-o-2_6, modeling_minicpmo.py,
`get_sys_prompt`, `streaming_prefill`, `streaming_generate`, and 4.5's `DuplexCapability`; 4.5's also in
OpenBMB/MiniCPM-o-Demo, MiniCPMO45/, with `StreamDecoder` in its utils.py). How the encoder hears a second
alone stands in engine/vllm/minicpmo.py.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from engine.audio.resample import limited
from engine.models.family import Detokenizer, EngineRecipe, Family, FamilyInfo, ItemLayout
from engine.models.published import checkpoint_name, read_config
from engine.models.qwen_tokenizer import load_tokenizer
from engine.models.text import TextCodec
from engine.types import SAMPLE_RATE, Features, Hearing, Intake, Pcm, Sampling, TurnMode

if TYPE_CHECKING:
    import torch

    from engine.models.log_mel import LogMel
    from engine.models.minicpmo_mel import MelStream, StreamingLogMel

FIRST_EXTRA_SAMPLES = 560
"""4.5: silence before a stream, so that its first second fills a unit with its margin (published: 35 ms).
Either version: what is shorter at the end of a turn is not worth a second's tokens."""

JITTER_SAMPLES = 640
"""4.5, continuous mode: 40 ms more of it, so that a tick that brings a little less still fills its unit."""

MAX_UNITS = 29
"""Seconds after which the encoder's positions begin again: as published, before its 1,500 are used up."""

_NOTHING: Pcm = np.zeros(0, np.float32)


def minicpmo(model_dir: Path, *, device: str = "cpu") -> MiniCPMO:
    """The family of a checkpoint's version. Raises ValueError for one that is not served."""
    version = str(read_config(model_dir).get("version", "2.6"))
    families = {"2.6": MiniCPMO26, "4.5": MiniCPMO45}
    if version not in families:
        known = ", ".join(sorted(families))
        raise ValueError(f"{model_dir} holds MiniCPM-o {version}, which is not served here; known: {known}")
    return families[version](model_dir, device=device)


@dataclass(slots=True)
class Ear:
    """What one session's audio left behind; less than two seconds of it."""

    rest: Pcm = field(default_factory=lambda: _NOTHING)  # waits for its second to fill
    mel: MelStream | None = None  # 4.5: the stream's spectrogram so far; None at its start
    num_units: int = 0  # seconds since the encoder's positions last began
    is_continuous: bool = False

    def reset(self) -> None:
        self.rest, self.mel, self.num_units = _NOTHING, None, 0

    def copy(self) -> Ear:
        mel = None if self.mel is None else replace(self.mel, peaks=self.mel.peaks.copy())
        return replace(self, mel=mel)

    def become(self, other: Ear) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(other, each.name))


class MiniCPMO(Family):
    """What both versions share: ChatML around seconds of audio."""

    name: ClassVar[str]
    unit_tokens: ClassVar[int]  # of a second of audio
    unit_frames: ClassVar[int]  # of the spectrogram, margins counted
    max_tokens_per_tick: ClassVar[int]
    answer_opening: ClassVar[tuple[str, ...]]  # between "assistant\n" and the answer
    instructing_role: ClassVar[str]
    default_instructions = (  # `get_sys_prompt`, where no voice is to be cloned
        "You are a helpful assistant. You can accept audio and text input and output voice and text."
    )

    def __init__(self, model_dir: Path, *, device: str = "cpu") -> None:
        """`model_dir` is a checkpoint as published; the features are computed on `device`."""
        self._model_dir = model_dir
        self._device = device
        self._config = read_config(model_dir)
        tokens = 50 // int(self._config.get("audio_pool_step", 50 // self.unit_tokens))
        if tokens != self.unit_tokens:
            raise ValueError(f"{model_dir}: a second is {tokens} tokens, not {self.unit_tokens} as published")
        self._codec = TextCodec(load_tokenizer(model_dir))
        self._newline = self._codec.encode("\n")
        self._start, self._end, self._unknown, self._tts_eos = (
            self._codec.special(token) for token in ("<|im_start|>", "<|im_end|>", "<unk>", "<|tts_eos|>")
        )  # <unk>: the placeholder, as published
        self._audio_start = self._codec.special("<|audio_start|>")
        self._audio_end = self._codec.special("<|audio_end|>")
        self._end_of_text = self._codec.special("<|endoftext|>")
        self.info = FamilyInfo(
            name=self.name,
            budget_s=1.0,
            max_tokens_per_tick=self.max_tokens_per_tick,
            target_fraction=0.3,
            turn_modes=(TurnMode.SERVER_VAD, TurnMode.MANUAL, TurnMode.CONTINUOUS),
            playback_tokens_per_s=4.0,  # unhurried speech: 3 words a second
            transcribes=False,
            audio_tokens_per_s=self.unit_tokens,
            checkpoint=checkpoint_name(model_dir),
        )

    def engine_recipe(self) -> EngineRecipe:
        dtype = self._config.get("dtype") or self._config.get("torch_dtype") or "bfloat16"
        return EngineRecipe(
            model_dir=self._model_dir,
            max_session_tokens=int(self._config.get("max_position_embeddings", 32_768)),
            dtype=str(dtype),
            modality="audio",
            layout=ItemLayout(
                tensors={
                    "audio_features": ("float32", (1, 80, None)),
                    "audio_is_first": ("bool", (1,)),
                    "audio_position": ("int64", (1,)),
                },
                frames=(self.unit_frames, self.unit_frames),
                num_tokens=lambda num_frames: self.unit_tokens,
                values={},
            ),
            samplings=self.samplings(),
            overrides={"skip_tokenizer_init": True},  # vLLM needs none, and the checkpoint's is remote code
        )

    # the conversation's template

    def head(self, instructions: str) -> tuple[int, ...]:
        """The instructions: they end before the first user's turn, so no audio is in them."""
        return self.instruct(instructions)

    def open_turn(self, mode: TurnMode) -> tuple[int, ...]:
        return self._user

    def close_turn(self, mode: TurnMode) -> tuple[int, ...]:
        return self._assistant

    def close_answer(self, mode: TurnMode) -> tuple[int, ...]:
        """An answer is meant to be spoken: `<|tts_eos|>` ends it, and the message ends behind that."""
        return (self._tts_eos, self._end, *self._newline)

    def instruct(self, instructions: str) -> tuple[int, ...]:
        text = instructions.strip() or self.default_instructions
        message = self._codec.encode(f"{self.instructing_role}\n{text}")
        return (self._start, *message, self._end, *self._newline)

    def sampling(self, mode: TurnMode) -> Sampling:
        return self._sampling

    def detokenizer(self) -> Detokenizer:
        return self._codec.detokenizer()

    @cached_property
    def _user(self) -> tuple[int, ...]:
        return (self._start, *self._codec.encode("user\n"))

    @cached_property
    def _assistant(self) -> tuple[int, ...]:
        tokens = [self._end, *self._newline, self._start, *self._codec.encode("assistant\n")]
        for part in self.answer_opening:
            tokens += [self._codec.special(part)] if part.startswith("<|") else self._codec.encode(part)
        return tuple(tokens)

    @cached_property
    def _sampling(self) -> Sampling:
        """As published, but without its repetition penalty of 1.05: vLLM's counts the prompt too, with all
        the tokens of template and audio in it, where the published one counts the answer's last words. Nor
        are brackets, quotes and list marks forbidden, as in 4.5's published turns."""
        return Sampling(temperature=0.7, top_p=0.8, top_k=100, stop_token_ids=self._stop_tokens())

    def _stop_tokens(self) -> tuple[int, ...]:
        return (self._tts_eos, self._end, self._end_of_text)

    # audio

    def new_ear(self) -> Ear:
        return Ear()

    def hear(self, batch: Sequence[Hearing]) -> list[Intake]:
        """Whole seconds only; less waits for more, and at the end of a turn it is filled up with silence."""
        ears: list[Ear] = [hearing.ear.copy() for hearing in batch]
        taken = [self._take(ear, hearing) for ear, hearing in zip(ears, batch, strict=True)]
        items = iter(self._items([unit for units in taken for unit in units]))
        intakes = []
        for ear, hearing, units in zip(ears, batch, taken, strict=True):
            intakes.append(self._intake([next(items) for _ in units], hearing.mode))
            if hearing.is_final and hearing.mode is not TurnMode.CONTINUOUS:
                ear.reset()
        for ear, hearing in zip(ears, batch, strict=True):
            hearing.ear.become(ear)  # only now: nothing can fail any more
        return intakes

    def _take(self, ear: Ear, hearing: Hearing) -> list[tuple[Ear, Pcm]]:
        """The seconds that are to be encoded now."""
        is_continuous = hearing.mode is TurnMode.CONTINUOUS
        if ear.is_continuous is not is_continuous:
            ear.reset()
            ear.is_continuous = is_continuous
        new = limited(hearing.audio)
        ear.rest = np.concatenate([ear.rest, new]) if len(ear.rest) else new
        units = self._cut(ear, hearing.is_final and not is_continuous)
        return [(ear, unit) for unit in units]

    @abstractmethod
    def _cut(self, ear: Ear, is_end: bool) -> list[Pcm]:
        """Take whole units from `ear.rest`; at the end of a turn all of it."""

    @abstractmethod
    def _features(self, units: Sequence[tuple[Ear, Pcm]]) -> list[tuple[torch.Tensor, bool]]:
        """Mel frames of each unit, and whether a stream begins with it."""

    def _items(self, units: list[tuple[Ear, Pcm]]) -> list[Features]:
        import torch

        items = []
        for (ear, _), (mel, is_first) in zip(units, self._features(units), strict=True):
            tensors = {
                "audio_features": mel[None],
                "audio_is_first": torch.tensor([is_first]),
                "audio_position": torch.tensor([50 * ear.num_units]),
            }
            items.append(Features(offset=0, num_tokens=self.unit_tokens, tensors=tensors))
            ear.num_units = (ear.num_units + 1) % MAX_UNITS
        return items

    def _intake(self, items: Sequence[Features], mode: TurnMode) -> Intake:
        tokens: list[int] = []
        placed: list[Features] = []
        for i, item in enumerate(items):
            before, behind = self._around(mode, is_last=i == len(items) - 1)
            tokens += before
            placed.append(Features(len(tokens), item.num_tokens, item.tensors))
            tokens += [*(self._unknown,) * item.num_tokens, *behind]
        return Intake(tuple(tokens), tuple(placed))

    def _around(self, mode: TurnMode, *, is_last: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self._audio_start,), (self._audio_end,)


class MiniCPMO26(MiniCPMO):
    """25 tokens a second, over Qwen2.5-7B. Each second is a recording of its own to Whisper's feature
    extractor, as in the published streaming code.

    It was not trained to decide by itself when to speak: in continuous mode each tick's audio is a user's
    message, and it answers each.
    """

    name = "minicpm-o-2.6"
    unit_tokens = 25
    unit_frames = 100
    max_tokens_per_tick = 20
    answer_opening = ("<|spk_bos|>", "<|spk|>", "<|spk_eos|>", "<|tts_bos|>")
    instructing_role = "user"  # of all that `get_sys_prompt` gives in this version

    def warm_up(self) -> None:
        self._mel([np.zeros(SAMPLE_RATE, np.float32)])

    @cached_property
    def _mel(self) -> LogMel:
        from engine.models.log_mel import Ending, LogMel

        return LogMel(80, Ending.SILENCE, self._device)

    def _cut(self, ear: Ear, is_end: bool) -> list[Pcm]:
        return _seconds(ear, is_end)

    def _features(self, units: Sequence[tuple[Ear, Pcm]]) -> list[tuple[torch.Tensor, bool]]:
        return [(mel, False) for mel in self._mel([samples for _, samples in units])]


class MiniCPMO45(MiniCPMO):
    """10 tokens a second, over Qwen3-8B; full duplex as published in continuous mode.

    There a tick is a `<unit>`: a second of audio, then `<|listen|>`, or `<|speak|>` and up to 18 more tokens
    until `<|chunk_eos|>`; an answer goes on over units until `<|turn_eos|>`. Not followed: the published loop
    replaces `<|listen|>` inside an answer by `<|tts_bos|>`, forbids `<|tts_pad|>`, and makes `<|turn_eos|>`
    less likely.
    """

    name = "minicpm-o-4.5"
    unit_tokens = 10
    unit_frames = 104
    max_tokens_per_tick = 19
    answer_opening = ("<think>\n\n</think>\n\n", "<|tts_bos|>")
    instructing_role = "system"

    def __init__(self, model_dir: Path, *, device: str = "cpu") -> None:
        super().__init__(model_dir, device=device)
        self._unit, self._unit_end, self._listen, self._chunk_eos, self._chunk_tts_eos, self._turn_eos = (
            self._codec.special(token)
            for token in (
                *("<unit>", "</unit>", "<|listen|>", "<|chunk_eos|>", "<|chunk_tts_eos|>", "<|turn_eos|>"),
            )
        )

    # full duplex

    def open_turn(self, mode: TurnMode) -> tuple[int, ...]:
        return (self._unit,) if mode is TurnMode.CONTINUOUS else super().open_turn(mode)

    def close_turn(self, mode: TurnMode) -> tuple[int, ...]:
        """Nothing in continuous mode: the model decides right behind the audio."""
        return () if mode is TurnMode.CONTINUOUS else super().close_turn(mode)

    def close_answer(self, mode: TurnMode) -> tuple[int, ...]:
        if mode is not TurnMode.CONTINUOUS:
            return super().close_answer(mode)
        return self.close_stopped(mode, self._chunk_eos)

    def close_stopped(self, mode: TurnMode, stop_token: int) -> tuple[int, ...]:
        if mode is not TurnMode.CONTINUOUS:
            return super().close_stopped(mode, stop_token)
        is_unit_end = stop_token in (self._listen, self._chunk_eos, self._chunk_tts_eos)
        return (stop_token if is_unit_end else self._chunk_eos, self._unit_end)

    def is_pause(self, mode: TurnMode, token_ids: Sequence[int], stop_token: int) -> bool:
        is_chunk = stop_token in (self._chunk_eos, self._chunk_tts_eos)
        return mode is TurnMode.CONTINUOUS and is_chunk and self._turn_eos not in token_ids

    def sampling(self, mode: TurnMode) -> Sampling:
        return self._duplex_sampling if mode is TurnMode.CONTINUOUS else self._sampling

    @cached_property
    def _duplex_sampling(self) -> Sampling:
        return replace(self._sampling, top_k=20)

    def _stop_tokens(self) -> tuple[int, ...]:
        return (*super()._stop_tokens(), self._listen, self._chunk_eos, self._chunk_tts_eos)

    def _around(self, mode: TurnMode, *, is_last: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """A tick that brings two seconds: to the first of them the model has listened."""
        if mode is not TurnMode.CONTINUOUS:
            return super()._around(mode, is_last=is_last)
        return (), () if is_last else (self._listen, self._unit_end, self._unit)

    # audio

    def warm_up(self) -> None:
        from engine.models.minicpmo_mel import FIRST_SAMPLES, MelStream

        self._mel([(MelStream(), np.zeros(FIRST_SAMPLES, np.float32))])

    @cached_property
    def _mel(self) -> StreamingLogMel:
        from engine.models.minicpmo_mel import StreamingLogMel

        return StreamingLogMel(self._device)

    def _cut(self, ear: Ear, is_end: bool) -> list[Pcm]:
        """A stream's first unit is longer by its margin; silence before it makes up for it, as published."""
        from engine.models.minicpmo_mel import FIRST_SAMPLES, MelStream

        units: list[Pcm] = []
        if ear.mel is None:
            extra = FIRST_EXTRA_SAMPLES + (JITTER_SAMPLES if ear.is_continuous else 0)
            is_enough = len(ear.rest) >= SAMPLE_RATE or is_end or ear.is_continuous
            if not len(ear.rest) or not is_enough:
                return units
            missing = SAMPLE_RATE + extra - len(ear.rest)
            if missing < 0:  # several seconds come at once: for them too
                missing = missing % SAMPLE_RATE if missing % SAMPLE_RATE <= extra else 0
            ear.rest = np.pad(ear.rest, (missing, 0))
            ear.mel = MelStream()
            units.append(ear.rest[:FIRST_SAMPLES])
            ear.rest = ear.rest[FIRST_SAMPLES:]
        return units + _seconds(ear, is_end)

    def _features(self, units: Sequence[tuple[Ear, Pcm]]) -> list[tuple[torch.Tensor, bool]]:
        return self._mel([(ear.mel, samples) for ear, samples in units if ear.mel is not None])


def _seconds(ear: Ear, is_end: bool) -> list[Pcm]:
    """Take the whole seconds out of the ear; at a turn's end what is left too, with silence behind it."""
    if is_end and len(ear.rest) % SAMPLE_RATE > FIRST_EXTRA_SAMPLES:
        ear.rest = np.pad(ear.rest, (0, -len(ear.rest) % SAMPLE_RATE))
    end = len(ear.rest) - len(ear.rest) % SAMPLE_RATE
    units = [ear.rest[start : start + SAMPLE_RATE] for start in range(0, end, SAMPLE_RATE)]
    ear.rest = ear.rest[end:].copy()
    return units
