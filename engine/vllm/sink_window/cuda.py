"""Sink-window attention on CUDA: our kernel over vLLM's whole block table, with the exact mask.

The table keeps an entry for every block a session ever had. Those in the gap are stale, and the kernel never
looks at them. Keys and values are written by vLLM's own Triton code, in its layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.config.cache import CacheDType
from vllm.config.compilation import CUDAGraphMode
from vllm.utils.torch_utils import async_tensor_h2d, is_quantized_kv_cache
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
from vllm.v1.attention.backends.utils import get_num_attention_heads_from_layers
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig
from vllm.v1.worker.gpu_worker import Worker

from engine.engine import EngineError
from engine.vllm.compaction.worker import CompactionWorker
from engine.vllm.sink_window.graphs import StepGraphs
from engine.vllm.sink_window.heads import SinkRows, SinkWindowWorker
from engine.vllm.sink_window.spec import SinkWindowSpec, windowed
from kernels.sink_window import Scratch
from kernels.sink_window.launcher import HEAD_SIZES, Layer, Step, launch


@dataclass
class SinkWindowMetadata:
    """One step's batch. Tensors lie on the device, at the same address in every replay of a CUDA graph."""

    num_actual_tokens: int
    slot_mapping: torch.Tensor
    window: int
    step: Step  # the rows as the kernel takes them; rows that pad the batch have no tokens


class SinkWindowCUDABuilder(SinkRows, AttentionMetadataBuilder[SinkWindowMetadata]):
    # Grids depend on the numbers of rows and tokens a graph is captured for; rows that pad it are empty.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if not isinstance(kv_cache_spec, SinkWindowSpec):
            raise EngineError(
                f"the attention of {len(layer_names)} layers (such as {layer_names[0]}) cannot be windowed: "
                f"it is {type(kv_cache_spec).__name__}; choose another model, or keep everything with "
                "kv=unbounded"
            )
        self._window = kv_cache_spec.window_tokens
        num_heads = get_num_attention_heads_from_layers(
            vllm_config, layer_names
        ) or vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
        graphs = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        max_rows = max(vllm_config.scheduler_config.max_num_seqs, graphs)
        self._scratch = Scratch.allocate(
            max_rows, num_heads, kv_cache_spec.num_kv_heads, kv_cache_spec.head_size, self._window, device
        )
        self._sinks = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._sinks_now = np.zeros(max_rows, dtype=np.int32)  # what was last written there

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> SinkWindowMetadata:
        batch, num_reqs = common_attn_metadata, common_attn_metadata.num_reqs
        sinks = self.num_sink_tokens(batch)
        if not np.array_equal(sinks, self._sinks_now[:num_reqs]):
            self._sinks_now[:num_reqs] = sinks
            async_tensor_h2d(sinks, out=self._sinks[:num_reqs])
        step = Step(
            batch.num_actual_tokens,
            batch.max_query_len,
            batch.query_start_loc[: num_reqs + 1],
            batch.seq_lens[:num_reqs],
            batch.block_table_tensor,
            self._sinks[:num_reqs],
            self._scratch,
        )
        return SinkWindowMetadata(batch.num_actual_tokens, batch.slot_mapping, self._window, step)


class SinkWindowCUDAImpl(TritonAttentionImpl):
    """Writes the cache as vLLM's Triton backend does, and reads it with our kernel."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kv_cache: torch.Tensor | None = None  # of the layer, and our launches over it
        self._launches: Layer | None = None
        self.supports_quant_query_input = False  # an fp8 cache is read with bf16 queries
        lacks = {
            "ALiBi": self.alibi_slopes is not None,
            "capped logits": bool(self.logits_soft_cap),
            "a lookback of chunks": self.chunk_lookback != -1,
        }
        if any(lacks.values()):
            names = " and ".join(name for name, is_asked in lacks.items() if is_asked)
            raise EngineError(
                f"this model's attention uses {names}, which our kernel lacks: choose another model, or keep "
                "everything with kv=unbounded"
            )

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        return False

    def forward(
        self,
        layer: Any,  # has the scales of an fp8 cache
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: SinkWindowMetadata,  # type: ignore[override]
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query and output [num_tokens, num_heads, head_size]; kv_cache [blocks, heads, slots, 2 * size]."""
        if attn_metadata is None:
            return output.fill_(0)  # vLLM measures its memory
        if kv_cache is not self._kv_cache:
            self._kv_cache, self._launches = kv_cache, self._lay_out(layer, query, kv_cache, attn_metadata)
        assert self._launches is not None
        launch(self._launches, attn_metadata.step, query, output)
        return output

    def _lay_out(
        self, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, attn_metadata: SinkWindowMetadata
    ) -> Layer:
        """Once for the layer's memory: vLLM hands over the same tensor in every step."""
        key_cache, value_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        if is_quantized_kv_cache(self.kv_cache_dtype):
            key_cache, value_cache = key_cache.view(self.fp8_dtype), value_cache.view(self.fp8_dtype)
        return Layer(
            key_cache,
            value_cache,
            self.num_heads,
            query.dtype,
            attn_metadata.window,
            self.scale,
            layer._k_scale,
            layer._v_scale,
        )


class SinkWindowCUDABackend(TritonAttentionBackend):
    """Registered as CUSTOM and asked for by kind: plain full attention only (settings.py)."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [
        "auto",
        "float16",
        "bfloat16",
        "fp8",
        "fp8_e4m3",
    ]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TritonAttentionImpl]:
        return SinkWindowCUDAImpl

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:  # type: ignore[override]
        return SinkWindowCUDABuilder

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return windowed(spec)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in HEAD_SIZES

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_sink(cls) -> bool:
        return False  # learned ones

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return False

    @classmethod
    def supports_rswa(cls) -> bool:
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return False

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False

    @classmethod
    def supports_alibi_sqrt(cls) -> bool:
        return False


class SinkWindowGPUWorker(CompactionWorker, SinkWindowWorker, Worker):
    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)
        runner: Any = self.model_runner
        manager = runner.cudagraph_manager
        if manager is not None and manager.cudagraph_mode == CUDAGraphMode.FULL:  # as settings.py asks
            runner.cudagraph_manager = StepGraphs(
                self.vllm_config,
                manager.device,
                CUDAGraphMode.FULL,
                manager.decode_query_len,
                manager.lora_capture_cases,
            )
