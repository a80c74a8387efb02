"""An EngineCore that schedules asynchronously, as on CUDA, over a model that is arithmetic.

vLLM refuses asynchronous scheduling on the CPU. Here its own `step_with_batch_queue` drives our
`AsyncParkingScheduler` with two steps in flight, and an executor on paper stands for the device: it keeps
each request's tokens as vLLM's V2 runner does and samples a token that is a function of all those before it,
so that a token lost, doubled or misplaced changes the answer.
"""

from __future__ import annotations

import queue
import zlib
from collections import deque
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine.core import EngineCore
from vllm.v1.outputs import ModelRunnerOutput

from engine.vllm.scheduler import AsyncParkingScheduler

STEPS_IN_FLIGHT = 2


class PaperExecutor:
    """Stands for executor, worker and runner."""

    def __init__(self) -> None:
        self.requests: dict[str, list[int]] = {}  # tokens, those sampled included
        self.prompt_lengths: dict[str, int] = {}
        self.input_batch = SimpleNamespace(req_id_to_index={})
        self.driver_worker = SimpleNamespace(worker=SimpleNamespace(model_runner=self))
        self._scheduled: SchedulerOutput | None = None

    def execute_model(self, scheduled: SchedulerOutput, non_block: bool = True) -> Future[Any]:
        for request_id in scheduled.finished_req_ids:
            self.requests.pop(request_id, None)
        for new in scheduled.scheduled_new_reqs:  # a resumed session comes as new, with all it holds
            assert new.prefill_token_ids is not None
            self.requests[new.req_id] = list(new.prefill_token_ids)
            self.prompt_lengths[new.req_id] = len(new.prefill_token_ids)
        future: Future[Any] = Future()
        if scheduled.total_num_scheduled_tokens == 0:
            future.set_result(ModelRunnerOutput([], {}))
        else:
            self._scheduled = scheduled
            future.set_result(None)
        return future

    def sample_tokens(self, grammar_output: Any, non_block: bool = True) -> Future[ModelRunnerOutput]:
        assert self._scheduled is not None
        scheduled, self._scheduled = self._scheduled, None
        computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled = []
        for request_id, num_tokens in scheduled.num_scheduled_tokens.items():
            end = computed[request_id] + num_tokens
            tokens = self.requests[request_id]
            assert end <= len(tokens), "a token was scheduled that nobody sampled"
            sampled.append([self._sample(request_id, tokens)] if end == len(tokens) else [])
        ids = list(scheduled.num_scheduled_tokens)
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(ModelRunnerOutput(ids, {name: i for i, name in enumerate(ids)}, sampled))
        return future

    def shutdown(self) -> None:
        pass

    def _sample(self, request_id: str, tokens: list[int]) -> int:
        token = 10 + zlib.crc32(bytes(tokens)) % 200
        tokens.append(token)
        return token


def async_core(core: EngineCore) -> EngineCore:
    """A second EngineCore with the configuration of a real one, scheduling ahead, computing on paper."""
    scheduler = core.scheduler
    paper: Any = object.__new__(EngineCore)
    paper.vllm_config = core.vllm_config
    paper.structured_output_manager = core.structured_output_manager
    paper.scheduler = AsyncParkingScheduler(
        vllm_config=core.vllm_config,
        kv_cache_config=scheduler.kv_cache_config,  # pyright: ignore[reportAttributeAccessIssue]
        structured_output_manager=core.structured_output_manager,
        block_size=scheduler.block_size,  # pyright: ignore[reportAttributeAccessIssue]
    )
    paper.scheduler.use_v2_model_runner = True
    paper.model_executor = PaperExecutor()
    paper.batch_queue, paper.batch_queue_size = deque(maxlen=STEPS_IN_FLIGHT), STEPS_IN_FLIGHT
    paper.step_fn = paper.step_with_batch_queue
    paper.async_scheduling, paper.log_stats = True, False
    paper.is_mm_encoder_only = paper.is_pooling_model = False
    paper.check_for_draft_tokens = paper.use_spec_decode = False
    paper.mm_receiver_cache = paper.request_block_hasher = None
    paper.aborts_queue = queue.Queue()
    paper._weight_version = "default"
    return paper
