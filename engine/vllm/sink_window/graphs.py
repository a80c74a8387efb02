"""CUDA graphs of whole steps: one for every size, and one more for each size that only decodes."""

from __future__ import annotations

from dataclasses import replace

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager


class StepGraphs(ModelCudaGraphManager):
    """vLLM's choice of a step's graph, with decodes apart.

    Its mode FULL captures a size once, for whatever batch has so many tokens, so a step that only decodes
    would launch the kernel for chunks in vain, in every layer. Its other modes know a graph for decodes, but
    cut all other steps at each layer's attention, which then waits for the host.
    """

    def _init_candidates(self) -> None:
        super()._init_candidates()
        assert self.decode_query_len == 1  # no speculative decoding; see starting.check
        any_batch = self._capture_descs.get(CUDAGraphMode.FULL, [])
        decodes = [
            replace(graph, num_reqs=graph.num_tokens, uniform_token_count=1)
            for graph in any_batch
            if graph.num_tokens <= self.max_num_reqs
        ]
        if not decodes:
            return
        self._capture_descs[CUDAGraphMode.FULL] = sorted(
            [*any_batch, *decodes], key=lambda graph: graph.num_tokens, reverse=True
        )
        for (num_tokens, num_loras), found in self._candidates.items():
            fitting = [graph for graph in decodes if _fits(graph, num_tokens, num_loras)]
            if fitting:  # the first that is compatible is taken
                found.insert(0, min(fitting, key=lambda graph: graph.num_tokens))


def _fits(graph: BatchExecutionDescriptor, num_tokens: int, num_loras: int) -> bool:
    return graph.num_tokens >= num_tokens and graph.num_active_loras == num_loras
