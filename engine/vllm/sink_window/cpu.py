"""Sink-window attention on the CPU: vLLM's own kernel over a block table without the gap.

Keys carry their rotation from their absolute position, so plain causal attention over the resident blocks in
order is sink-window attention, rounded outward: S to the end of its block, and W to the start of the block
where the first query of the chunk begins to see. A chunk's later queries see as far back as its first.
"""

from __future__ import annotations

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import AttentionSpec
from vllm.v1.worker.cpu_worker import CPUWorker

from engine.engine import EngineError
from engine.vllm.compaction.worker import CompactionWorker
from engine.vllm.sink_window.heads import SinkRows, SinkWindowWorker
from engine.vllm.sink_window.spec import SinkWindowSpec, windowed


def compact(
    batch: CommonAttentionMetadata, num_sink_tokens: torch.Tensor, window: int, block_size: int
) -> CommonAttentionMetadata:
    """The batch with each row's gap cut out of its block table and its length.

    `num_sink_tokens` is int32 [num_reqs]. The freed blocks are those of `layout.gap_blocks` at the tokens
    done before this step; a session without any stays as it is.
    """
    seq_lens, table = batch.seq_lens, batch.block_table_tensor
    done = seq_lens - (batch.query_start_loc[1:] - batch.query_start_loc[:-1])
    first = (num_sink_tokens + block_size - 1) // block_size
    last = (done - window + 1).clamp(min=0) // block_size
    gap = (last - first).clamp(min=0)
    if not gap.any():
        return batch
    seq_lens = seq_lens - gap * block_size
    max_seq_len = int(seq_lens.max())
    columns = torch.arange(-(-max_seq_len // block_size))
    # Rows shorter than the longest run past their end here; the kernel stops at seq_lens.
    source = columns + torch.where(columns >= first[:, None], gap[:, None], 0)
    table = table.gather(1, source.clamp(max=table.shape[1] - 1))
    return batch.replace(seq_lens=seq_lens, max_seq_len=max_seq_len, block_table_tensor=table)


class SinkWindowCPUBuilder(SinkRows, CPUAttentionMetadataBuilder):
    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names).values()
        if isinstance(kv_cache_spec, SinkWindowSpec) and any(
            getattr(layer.impl, "alibi_slopes", None) is not None for layer in layers
        ):
            raise EngineError(
                "this model's attention uses ALiBi, which measures distances in the block table, and a gap "
                "cut out of it changes them: choose another model, or keep everything with kv=unbounded"
            )

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        if isinstance(self.kv_cache_spec, SinkWindowSpec):
            sinks = torch.from_numpy(self.num_sink_tokens(common_attn_metadata))
            window = self.kv_cache_spec.window_tokens
            common_attn_metadata = compact(common_attn_metadata, sinks, window, self.block_size)
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


class SinkWindowCPUBackend(CPUAttentionBackend):
    """vLLM's CPU backend wherever a layer is not windowed."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]  # its kernel takes them (ISA vec16); vLLM only declares multiples of 32

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return windowed(super().customize_spec(spec))

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        return SinkWindowCPUBuilder


class SinkWindowCPUWorker(CompactionWorker, SinkWindowWorker, CPUWorker):
    pass
