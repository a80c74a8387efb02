"""MiniCPM-o 2.6 and 4.5 as vLLM runs them here: ears and language model, nothing of the checkpoint's code.

vLLM's own class for the architecture builds the checkpoint's processor at start, which is remote code, and
its vision tower. This one is registered in its place (`register`): a configuration, a model of vLLM's parts
and a processor that knows what a second's features look like. No tokenizer, no image is ever loaded.

The audio encoder hears one second at a time, at its place in the stream. Published streaming
(openbmb/MiniCPM-o-4_5, modeling_minicpmo.py, `get_audio_embedding_streaming`) also lets it look back at the
keys and values of up to 28 earlier seconds; vLLM's encoder pass has no such cache. Measured with Whisper
tiny.en's weights on 24 s of talk (tests/engine/models/test_minicpmo_encoder.py): the embeddings have a cosine
of 0.91 to the published ones. Without the places it is 0.50; a second encoded with the one before it, 0.96.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, BatchFeature, Qwen3Config, WhisperConfig
from vllm.config import VllmConfig
from vllm.inputs import mm_input
from vllm.model_executor.models.interfaces import MultiModalEmbeddings, SupportsMultiModal
from vllm.model_executor.models.minicpmo import MiniCPMWhisperEncoder, MultiModalProjector
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.registry import ModelRegistry
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange
from vllm.multimodal.processing import BaseDummyInputsBuilder, BaseMultiModalProcessor, BaseProcessingInfo

ARCHITECTURE = "MiniCPMO"
UNIT_FRAMES = 100  # mel frames of a second
MARGIN_FRAMES = {(2, 6): 0, (4, 5): 2}  # on either side of them, for the convolutions
_BACKBONES = {(2, 6): Qwen2ForCausalLM, (4, 5): Qwen3ForCausalLM}


class MiniCPMOConfig(Qwen3Config):
    """The checkpoint's config.json: the backbone's values at its top, the encoder's in `audio_config`."""

    model_type = "minicpmo"
    audio_config: dict[str, Any] | WhisperConfig | None = None
    audio_pool_step: int | None = None
    version: str = "2.6"

    def __post_init__(self, **kwargs: Any) -> None:
        if self.audio_pool_step is None:  # as the checkpoint's own configuration class
            self.audio_pool_step = 5 if str(self.version) == "4.5" else 2
        if not isinstance(self.audio_config, WhisperConfig):
            self.audio_config = WhisperConfig(**(self.audio_config or {}))
        super().__post_init__(**kwargs)


def version_of(config: Any) -> tuple[int, int]:
    """(2, 6) or (4, 5). Raises ValueError for others, which are of another make."""
    text = str(config.version)
    version = {"2.6": (2, 6), "4.5": (4, 5)}.get(text)
    if version is None:
        raise ValueError(f"MiniCPM-o {text} is not served here; 2.6 and 4.5 are")
    return version


def num_unit_tokens(config: Any) -> int:
    """Embeddings that a second of audio becomes: its 50 encoder frames, averaged."""
    return UNIT_FRAMES // 2 // config.audio_pool_step


class _Info(BaseProcessingInfo):
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"audio": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        return {"audio": num_unit_tokens(self.get_hf_config())}


class _NoDummies(BaseDummyInputsBuilder[_Info]):
    """The processor makes its dummy input itself."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        raise NotImplementedError

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> Any:
        raise NotImplementedError


class UnitProcessor(BaseMultiModalProcessor[_Info]):
    """Takes ready-made features only: `audio_features` [n, mel bins, frames], `audio_is_first` [n] (nothing
    is before it), `audio_position` [n] (of its first encoder frame in the stream)."""

    requires_tokenizer = False

    def get_dummy_mm_inputs(self, mm_counts: Mapping[str, int], **_: Any) -> Any:
        config = self.info.get_hf_config()
        num_items, num_tokens = mm_counts.get("audio", 0), num_unit_tokens(config)
        shape = (num_items, config.audio_config.num_mel_bins, num_frames(config))
        inputs = BatchFeature(
            {
                "audio_features": torch.zeros(shape),
                "audio_is_first": torch.zeros(num_items, dtype=torch.bool),
                "audio_position": torch.zeros(num_items, dtype=torch.int64),
            }
        )
        return mm_input(
            prompt_token_ids=[0] * (num_items * num_tokens),
            mm_kwargs=MultiModalKwargsItems.from_hf_inputs(inputs, self._get_mm_fields_config(inputs, {})),
            mm_hashes={"audio": [f"dummy{i}" for i in range(num_items)]},
            mm_placeholders={
                "audio": [PlaceholderRange(i * num_tokens, num_tokens) for i in range(num_items)]
            },
        )

    def _get_mm_fields_config(
        self, hf_inputs: Mapping[str, Any], hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        """Raises ValueError for features of another shape: they would fail inside the engine's step."""
        config = self.info.get_hf_config()
        expected = (config.audio_config.num_mel_bins, num_frames(config))
        shape = tuple(hf_inputs["audio_features"].shape)
        if shape[1:] != expected:
            raise ValueError(f"audio_features are {list(shape[1:])} an item, not {list(expected)}")
        batched = MultiModalFieldConfig.batched("audio")
        return dict.fromkeys(("audio_features", "audio_is_first", "audio_position"), batched)

    def _get_prompt_updates(self, *args: Any, **kwargs: Any) -> Sequence[Any]:
        raise NotImplementedError("prompts come as tokens, with their placeholders in them")


def num_frames(config: Any) -> int:
    """Mel frames of one item."""
    return UNIT_FRAMES + 2 * MARGIN_FRAMES[version_of(config)]


class UnitEncoder(MiniCPMWhisperEncoder):
    """The audio encoder over seconds, each by itself, whatever else is in the batch."""

    def __init__(self, config: WhisperConfig, margin: int) -> None:
        super().__init__(config)
        self._margin = margin

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, mel: torch.Tensor, is_first: torch.Tensor, position: torch.Tensor
    ) -> torch.Tensor:
        """[n, mel bins, frames] -> [n, 50, width].

        The margins only feed the convolutions. A stream's first second has none before it: zeros stand there,
        and the second convolution sees the same zeros as at the start of a whole recording.
        """
        hidden = F.gelu(self.conv1(mel.to(self.embed_positions.weight.dtype)))
        if self._margin:
            hidden[..., : self._margin] *= ~is_first[:, None, None]
        hidden = F.gelu(self.conv2(hidden)).transpose(1, 2)
        num, start = UNIT_FRAMES // 2, self._margin // 2
        places = position.clamp(0, len(self.embed_positions.weight) - num)[:, None]
        places = places + torch.arange(num, device=places.device)
        hidden = hidden[:, start : start + num] + self.embed_positions.weight[places]
        for layer in self.layers:
            (hidden,) = layer(hidden, None)
        return self.layer_norm(hidden)


@MULTIMODAL_REGISTRY.register_processor(UnitProcessor, info=_Info, dummy_inputs=_NoDummies)
class MiniCPMO(nn.Module, SupportsMultiModal):
    """Whisper's encoder (`apm`), a projector, average pooling, and Qwen2 (2.6) or Qwen3 (4.5)."""

    hf_to_vllm_mapper = WeightsMapper(orig_to_new_prefix={"vpm.": None, "resampler.": None, "tts.": None})
    packed_modules_mapping = Qwen3ForCausalLM.packed_modules_mapping

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        return None

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        version = version_of(config)
        with self._mark_language_model(vllm_config):
            self.llm = _BACKBONES[version](vllm_config=vllm_config, prefix=maybe_prefix(prefix, "llm"))
        with self._mark_tower_model(vllm_config, "audio"):
            self.apm = UnitEncoder(config.audio_config, MARGIN_FRAMES[version])
            self.audio_projection_layer = MultiModalProjector(
                in_dim=config.audio_config.encoder_ffn_dim // 4, out_dim=config.hidden_size
            )
        self._pool_step = config.audio_pool_step
        self.make_empty_intermediate_tensors = self.llm.make_empty_intermediate_tensors

    def embed_multimodal(
        self,
        *,
        audio_features: Any = None,
        audio_is_first: Any = None,
        audio_position: Any = None,
        **_: object,
    ) -> MultiModalEmbeddings:
        """One [tokens, hidden size] an item."""
        if audio_features is None:
            return []
        hidden = self.apm(audio_features, audio_is_first.flatten(), audio_position.flatten())
        projected = self.audio_projection_layer(hidden).transpose(1, 2)
        return list(F.avg_pool1d(projected, self._pool_step, self._pool_step).transpose(1, 2))

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **_: object,
    ) -> Any:
        return self.llm.model(input_ids, positions, intermediate_tensors, inputs_embeds=inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.llm.compute_logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)


def register() -> None:
    """Once per process, before vLLM reads the checkpoint's configuration."""
    AutoConfig.register(MiniCPMOConfig.model_type, MiniCPMOConfig, exist_ok=True)
    ModelRegistry.register_model(ARCHITECTURE, MiniCPMO)
