"""vLLM's requests, built by hand from `Work`: no renderer, no tokenizer, no output processor."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping

import torch
from transformers import BatchFeature
from vllm.config import VllmConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldConfig,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from engine.models.family import ItemLayout
from engine.types import Features, Work
from engine.vllm.layout import LayoutCheck
from engine.vllm.sink_window.heads import head_arguments


class RequestBuilder:
    """Makes one `EngineCoreRequest` per work.

    Every list in it is new: vLLM goes on writing into the lists of a session's first request.
    """

    def __init__(
        self, vllm_config: VllmConfig, modality: str | None, layout: ItemLayout | None = None
    ) -> None:
        """Without a `layout` the shapes of features are not looked at."""
        self._modality = modality
        self._layout = None if layout is None else LayoutCheck(layout)
        self._fields_of_length: dict[int, Mapping[str, MultiModalFieldConfig]] = {}  # frames -> fields
        self._item_numbers = itertools.count()
        self._processor = (
            MULTIMODAL_REGISTRY.create_processor(vllm_config.model_config) if modality is not None else None
        )

    def build(self, request_id: str, work: Work) -> EngineCoreRequest:
        """Raises ValueError (and what torch raises) where sampling or features make no sense to vLLM."""
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=list(work.token_ids),
            mm_features=[
                self._feature(item, identifier=f"{request_id}:{work.seq}:{next(self._item_numbers)}")
                for item in work.features
            ]
            or None,
            sampling_params=_sampling_params(work),
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            resumable=True,
        )

    def _feature(self, item: Features, identifier: str) -> MultiModalFeatureSpec:
        """`identifier` must be new for ever: it is the key of the encoder's cache, and a key that comes back
        before the worker has forgotten it brings back what was heard then. A work's pieces share its `seq`.
        """
        assert self._modality is not None
        inputs = BatchFeature(dict(item.tensors))
        fields = self._fields(item, inputs)
        for name, tensor in item.tensors.items():
            if torch.is_tensor(tensor) and tensor.is_floating_point() and not _is_finite(tensor):
                raise ValueError(f"{name} holds values that are not finite")
        items = MultiModalKwargsItems.from_hf_inputs(inputs, fields).get(self._modality, ())
        if len(items) != 1:
            raise ValueError(f"the tensors hold {len(items)} items, not one")
        return MultiModalFeatureSpec(
            data=items[0],
            modality=self._modality,
            identifier=identifier,
            mm_position=PlaceholderRange(offset=item.offset, length=item.num_tokens),
        )

    def _fields(self, item: Features, inputs: BatchFeature) -> Mapping[str, MultiModalFieldConfig]:
        """Which tensor is cut how, and which stays on the CPU.

        vLLM's answer takes longer than all else in a request. By a family's layout it depends on nothing but
        the item's length, so it is asked once for each.
        """
        num_frames = None if self._layout is None else self._layout.check(item)
        if num_frames is not None and (known := self._fields_of_length.get(num_frames)) is not None:
            return known
        assert self._processor is not None
        fields = self._processor._get_mm_fields_config(inputs, {})
        unknown = sorted(set(item.tensors) - set(fields))
        if unknown:
            raise ValueError(f"the model knows no features named {', '.join(unknown)}")
        fields = {name: fields[name] for name in item.tensors}  # not those of images
        if num_frames is not None:
            self._fields_of_length[num_frames] = fields
        return fields


def _is_finite(tensor: torch.Tensor) -> bool:
    """By its extremes, which NaN is among: a tenth of what looking at each value costs."""
    return tensor.numel() == 0 or all(math.isfinite(value) for value in map(float, tensor.aminmax()))


def _sampling_params(work: Work) -> SamplingParams:
    sampling = work.sampling
    return SamplingParams(
        max_tokens=max(work.max_tokens, 1),  # vLLM samples one in any case; ours of 0 drop it
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        repetition_penalty=sampling.repetition_penalty,
        seed=sampling.seed,
        stop_token_ids=list(sampling.stop_token_ids),
        detokenize=False,
        extra_args=head_arguments(work.num_head_tokens),
    )
