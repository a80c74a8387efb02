"""Each request's S on its way: to our scheduler and its KV manager, and to the rows of the worker's batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.config import set_current_vllm_config
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

_KEY = "num_head_tokens"


def head_arguments(num_head_tokens: int) -> dict[str, Any]:
    """S as SamplingParams.extra_args, which vLLM hands on to scheduler and workers and never reads."""
    return {_KEY: num_head_tokens}


def head_tokens(sampling_params: SamplingParams | None) -> int:
    """A request's S in tokens; 0 where none was given."""
    arguments = None if sampling_params is None else sampling_params.extra_args
    return (arguments or {}).get(_KEY, 0)


class SinkWindowWorker:
    """Mixin over a vLLM worker: tells the metadata builders the S of each row of the batch they build for."""

    vllm_config: Any
    model_runner: Any
    _heads: dict[str, int]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._heads = {}  # of every request the worker knows

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        with set_current_vllm_config(self.vllm_config):  # the backends' customize_spec reads our options
            return super().get_kv_cache_spec()  # type: ignore[misc]

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        for groups in self.model_runner.attn_groups:
            for builder in (builder for group in groups for builder in group.metadata_builders):
                if isinstance(builder, SinkRows):
                    builder.sinks_of_rows = self._sinks_of_rows

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        for request_id in scheduler_output.finished_req_ids:
            self._heads.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            self._heads[new.req_id] = head_tokens(new.sampling_params)
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    def _sinks_of_rows(self, batch: CommonAttentionMetadata) -> Iterable[int]:
        if batch.req_idx is not None:  # runner V2: row -> slot in its request table -> request
            ids = map(self.model_runner.req_states.index_to_req_id.get, batch.req_idx.tolist())
        else:
            ids = self.model_runner.input_batch.req_ids
        return (self._heads.get(request_id, 0) for request_id in ids)


class SinkRows:
    """Mixin over a metadata builder: S by row."""

    sinks_of_rows: Any = None  # set by the worker; before, in vLLM's dry runs, S is 0

    def num_sink_tokens(self, batch: CommonAttentionMetadata) -> npt.NDArray[np.int32]:
        """[num_reqs]; 0 in rows that only pad the batch."""
        rows = np.zeros(batch.num_reqs, dtype=np.int32)
        if self.sinks_of_rows is not None:
            found = np.fromiter(self.sinks_of_rows(batch), dtype=np.int32)[: batch.num_reqs]
            rows[: len(found)] = found
        return rows
