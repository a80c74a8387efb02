"""Everything of vLLM that `engine/vllm/` relies on, by name.

vLLM is pinned; this file is the list to go through when the pin moves. A failure names what is missing or
changed, and the file of ours that uses it. Nothing is started here, but vLLM is imported.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

import pytest

pytestmark = pytest.mark.vllm

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
REQUEST = "vllm.v1.request:Request"

# what -> parameters we pass by name or position, in order where we override or pass by position
CALLS: dict[str, list[str]] = {
    # loading.py and core.py
    "vllm.v1.engine.core:EngineCore.__init__": ["vllm_config", "executor_class", "log_stats"],
    "vllm.v1.engine.core:EngineCore.preprocess_add_request": ["request"],
    "vllm.v1.engine.core:EngineCore.add_request": ["request"],
    "vllm.v1.engine.core:EngineCore.abort_requests": ["request_ids"],
    "vllm.v1.engine.core:EngineCore.step": [],
    "vllm.v1.engine.core:EngineCore.step_with_batch_queue": [],
    "vllm.v1.engine.core:EngineCore.post_step": ["model_executed"],
    "vllm.v1.engine.core:EngineCore.shutdown": [],
    "vllm.v1.executor:Executor.get_class": ["vllm_config"],
    "vllm.engine.arg_utils:EngineArgs.create_engine_config": ["usage_context"],
    "vllm.model_executor.models.registry:_LazyRegisteredModel.load_model_cls": [],
    "vllm.model_executor.models.registry:_ModelRegistry.register_model": ["model_arch", "model_cls"],
    "vllm.config:ModelConfig.get_vocab_size": [],
    "vllm.config:ModelConfig.get_num_layers": ["parallel_config"],
    "vllm.config:ModelConfig.get_num_kv_heads": ["parallel_config"],
    "vllm.config:ModelConfig.get_head_size": [],
    "vllm.v1.core.block_pool:BlockPool.get_num_free_blocks": [],
    # scheduler.py
    f"{SCHEDULER}._enqueue_waiting_request": ["request"],
    f"{SCHEDULER}._update_request_as_session": ["session", "update"],
    f"{SCHEDULER}.finish_requests": ["request_ids", "finished_status"],
    f"{SCHEDULER}.get_num_unfinished_requests": [],
    f"{SCHEDULER}.has_requests": [],
    f"{SCHEDULER}.has_unfinished_requests": [],
    f"{SCHEDULER}._handle_stopped_request": ["request"],
    f"{SCHEDULER}.add_request": ["request"],
    f"{SCHEDULER}._preempt_request": ["request", "timestamp", "drop_stale_output"],
    # requests.py
    "vllm.multimodal.registry:MultiModalRegistry.create_processor": ["model_config"],
    "vllm.multimodal.processing:BaseMultiModalProcessor._get_mm_fields_config": [
        "hf_inputs",
        "hf_processor_mm_kwargs",
    ],
    "vllm.multimodal.inputs:MultiModalKwargsItems.from_hf_inputs": ["hf_inputs", "config_by_key"],
}

# class -> fields we set or read
FIELDS: dict[str, list[str]] = {
    "vllm.engine.arg_utils:EngineArgs": [
        "model",
        "dtype",
        "load_format",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "kv_cache_memory_bytes",
        "gpu_memory_utilization",
        "block_size",
        "enforce_eager",
        "seed",
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "async_scheduling",
        "scheduler_cls",
        "disable_log_stats",
        "use_tqdm_on_load",
        "limit_mm_per_prompt",
        "mm_processor_cache_gb",
        "trust_remote_code",
    ],
    "vllm.v1.engine:EngineCoreRequest": [
        "request_id",
        "prompt_token_ids",
        "mm_features",
        "sampling_params",
        "pooling_params",
        "arrival_time",
        "lora_request",
        "cache_salt",
        "data_parallel_rank",
        "resumable",
    ],
    "vllm.v1.engine:EngineCoreOutputs": ["outputs"],
    "vllm.v1.engine:EngineCoreOutput": ["request_id", "new_token_ids", "finish_reason"],
    "vllm.sampling_params:SamplingParams": [
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "repetition_penalty",
        "seed",
        "stop_token_ids",
        "detokenize",
    ],
    "vllm.multimodal.inputs:MultiModalFeatureSpec": ["data", "modality", "identifier", "mm_position"],
    "vllm.multimodal.inputs:PlaceholderRange": ["offset", "length"],
}

# what our code reads of instances whose attributes only `__init__` names: source that must mention them
MENTIONS: dict[str, list[str]] = {
    "vllm.v1.engine.core:EngineCore.__init__": [
        "self.vllm_config",
        "self.scheduler",
        "self.batch_queue",
        "self.step_fn",
    ],
    f"{SCHEDULER}.__init__": [
        "self.running",
        "self.waiting",
        "self.kv_holding_waiting",
        "self.requests",
        "self.num_waiting_for_streaming_input",
        "self.max_model_len",
        "self.max_num_running_reqs",
        "self.max_num_scheduled_tokens",
        "self.max_num_encoder_input_tokens",
        "self.encoder_cache_manager",
        "self.kv_cache_manager",
        "self.block_size",
    ],
    f"{REQUEST}.__init__": [
        "self.request_id",
        "self.status",
        "self.max_tokens",
        "self.prompt_token_ids",
        "self.num_computed_tokens",
        "self.num_output_placeholders",
    ],
    "vllm.v1.core.kv_cache_manager:KVCacheManager.__init__": ["self.block_pool"],
    "vllm.v1.core.block_pool:BlockPool.__init__": ["self.num_gpu_blocks"],
    "vllm.v1.core.encoder_cache_manager:EncoderCacheManager.__init__": ["self.cache_size"],
    # behaviour we build on, where a silent change would break sessions
    f"{SCHEDULER}._handle_stopped_request": [
        "num_output_placeholders",  # a parked session keeps only what is computed
        "RequestStatus.WAITING_FOR_STREAMING_REQ",
        "self._enqueue_waiting_request(request)",  # the one door into the queues, which we hold
    ],
    f"{SCHEDULER}.add_request": ["self._update_request_as_session(existing, update)"],
    f"{SCHEDULER}.schedule": ["self.num_waiting_for_streaming_input", "self._preempt_request("],
    f"{SCHEDULER}.get_num_unfinished_requests": ["num_waiting -= self.num_waiting_for_streaming_input"],
    f"{SCHEDULER}.finish_requests": ["self.num_waiting_for_streaming_input -= 1"],
    "vllm.v1.core.sched.utils:check_stop": ["request.num_output_tokens >= request.max_tokens"],
}

MEMBERS: dict[str, list[str]] = {
    "vllm.v1.request:RequestStatus": ["WAITING_FOR_STREAMING_REQ", "RUNNING"],
    "vllm.v1.engine:FinishReason": ["STOP", "LENGTH"],
    "vllm.usage.usage_lib:UsageContext": ["ENGINE_CONTEXT"],
    REQUEST: ["num_output_tokens"],
    "vllm.config:ModelConfig": ["is_hybrid", "use_mla"],
    "vllm.model_executor.models.registry:_ModelRegistry": ["models"],
}


def find(dotted: str) -> Any:
    module, _, path = dotted.partition(":")
    thing: Any = importlib.import_module(module)
    for name in path.split("."):
        assert hasattr(thing, name), f"vLLM has no {dotted} any more ({name} is missing)"
        thing = getattr(thing, name)
    return thing


def field_names(cls: type) -> set[str]:
    if hasattr(cls, "__struct_fields__"):
        return set(cls.__struct_fields__)  # pyright: ignore[reportAttributeAccessIssue]  # msgspec
    if dataclasses.is_dataclass(cls):
        return {field.name for field in dataclasses.fields(cls)}
    return set(inspect.signature(cls).parameters)


def test_the_version_is_the_one_we_know():
    import vllm

    from engine.vllm.loading import VLLM_VERSION

    assert vllm.__version__.split("+")[0] == VLLM_VERSION


@pytest.mark.parametrize("dotted", CALLS)
def test_parameters(dotted):
    parameters = list(inspect.signature(find(dotted)).parameters)
    wanted = CALLS[dotted]
    ours = [name for name in parameters if name not in ("self", "cls")]
    assert ours[: len(wanted)] == wanted, f"{dotted} takes {ours}, we pass {wanted}"


@pytest.mark.parametrize("dotted", FIELDS)
def test_fields(dotted):
    missing = set(FIELDS[dotted]) - field_names(find(dotted))
    assert not missing, f"{dotted} lost {sorted(missing)}"


@pytest.mark.parametrize("dotted", MENTIONS)
def test_source_mentions(dotted):
    source = inspect.getsource(find(dotted))
    missing = [text for text in MENTIONS[dotted] if text not in source]
    assert not missing, f"{dotted} no longer says {missing}"


@pytest.mark.parametrize("dotted", MEMBERS)
def test_members(dotted):
    thing = find(dotted)
    names = field_names(thing) if isinstance(thing, type) and dataclasses.is_dataclass(thing) else set()
    missing = [name for name in MEMBERS[dotted] if not hasattr(thing, name) and name not in names]
    assert not missing, f"{dotted} lost {missing}"


def test_all_waiting_requests_pass_our_door():
    """Only these write into the queues; anything new might bring a parked session back into one."""
    scheduler = find(SCHEDULER)
    writers = {
        name
        for name, member in inspect.getmembers(scheduler, inspect.isfunction)
        for text in ("waiting.add_request(", "waiting.prepend_request(", "waiting.prepend_requests(")
        if text in inspect.getsource(member)
    }
    assert writers == {"_enqueue_waiting_request", "_preempt_request", "schedule"}


def test_both_schedulers_are_ours_over_vllms():
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from engine.vllm.scheduler import AsyncParkingScheduler, ParkingScheduler

    order = AsyncParkingScheduler.__mro__
    assert order.index(ParkingScheduler) < order.index(AsyncScheduler) < order.index(find(SCHEDULER))
