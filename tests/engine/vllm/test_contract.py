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
MANAGER = "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager"
ENCODER_CACHE = "vllm.v1.core.encoder_cache_manager:EncoderCacheManager"

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
    "vllm.v1.executor:Executor.collective_rpc": ["method", "timeout", "args"],
    "vllm.v1.worker.worker_base:WorkerBase.apply_model": ["fn"],
    "vllm.compilation.wrapper:TorchCompileWithNoGuardsWrapper.cleanup": [],
    "vllm.engine.arg_utils:EngineArgs.create_engine_config": ["usage_context"],
    "vllm.model_executor.models.registry:_LazyRegisteredModel.load_model_cls": [],
    "vllm.model_executor.models.registry:_ModelRegistry.register_model": ["model_arch", "model_cls"],
    "vllm.config:ModelConfig.get_vocab_size": [],
    "vllm.config:ModelConfig.get_num_layers": ["parallel_config"],
    "vllm.config:ModelConfig.get_num_kv_heads": ["parallel_config"],
    "vllm.config:ModelConfig.get_head_size": [],
    "vllm.v1.core.block_pool:BlockPool.get_num_free_blocks": [],
    # footprint.py
    "vllm.config:ModelConfig.get_inputs_embeds_size": [],
    "vllm.v1.worker.worker_base:WorkerBase.get_model": [],
    # sink_window/
    "vllm.v1.attention.backends.registry:register_backend": ["backend", "class_path"],
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register": ["kvcache_spec_cls", "manager_class"],
    "vllm.v1.kv_cache_interface:FullAttentionSpec.merge": ["specs"],
    "vllm.v1.kv_cache_interface:FullAttentionSpec.max_memory_usage_bytes": ["vllm_config"],
    "vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs.max_memory_usage_pages": ["vllm_config"],
    "vllm.v1.kv_cache_interface:replace_as": ["spec", "target_cls", "drop", "changes"],
    f"{MANAGER}.remove_skipped_blocks": ["request_id", "processed_computed_tokens", "num_prompt_tokens"],
    f"{MANAGER}._remove_blocks_in_range": ["request_id", "first_block", "last_block"],
    f"{MANAGER}.pop_blocks_for_free": ["request_id"],
    "vllm.v1.core.kv_cache_manager:KVCacheManager.remove_skipped_blocks": [
        "request_id",
        "processed_computed_tokens",
    ],
    "vllm.config:set_current_vllm_config": ["vllm_config"],
    "vllm.config:get_current_vllm_config_or_none": [],
    "vllm.v1.attention.backend:AttentionBackend.customize_spec": ["spec"],
    "vllm.v1.attention.backend:AttentionBackend.get_supported_kernel_block_sizes": ["kv_cache_spec"],
    "vllm.v1.attention.backend:AttentionMetadataBuilder.build": [
        "common_prefix_len",
        "common_attn_metadata",
        "fast_build",
    ],
    "vllm.v1.attention.backend:AttentionMetadataBuilder.build_for_cudagraph_capture": [
        "common_attn_metadata"
    ],
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder.build": [
        "common_prefix_len",
        "common_attn_metadata",
        "fast_build",
    ],
    "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl.do_kv_cache_update": [
        "layer",
        "key",
        "value",
        "kv_cache",
        "slot_mapping",
    ],
    "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl.forward": [
        "layer",
        "query",
        "key",
        "value",
        "kv_cache",
        "attn_metadata",
        "output",
    ],
    "vllm.v1.worker.gpu_worker:Worker.get_kv_cache_spec": [],
    "vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager.__init__": [
        "vllm_config",
        "device",
        "cudagraph_mode",
        "decode_query_len",
        "lora_capture_cases",
    ],
    "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager._init_candidates": [],
    "vllm.v1.worker.gpu_worker:Worker.initialize_from_config": ["kv_cache_config"],
    "vllm.v1.worker.gpu_worker:Worker.execute_model": ["scheduler_output"],
    "vllm.utils.torch_utils:async_tensor_h2d": ["data", "device", "dtype", "out"],
    # compaction/mover.py, rotation.py, key_layout.py
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.get_model": [],
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.get_model": [],
    "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding.forward_native": [
        "positions",
        "query",
        "key",
    ],
    "vllm.model_executor.layers.rotary_embedding.mrope:MRotaryEmbedding.forward_native": [
        "positions",
        "query",
        "key",
    ],
    "vllm._custom_ops:cpu_attn_reshape_and_cache": [
        "key",
        "value",
        "key_cache",
        "value_cache",
        "slot_mapping",
        "isa",
        "k_scale",
        "v_scale",
        "kv_cache_dtype",
    ],
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
    f"{SCHEDULER}.get_request_counts": [],
    f"{SCHEDULER}.schedule": ["throttle_prefills"],
    # compaction/
    "vllm.v1.core.block_pool:BlockPool.free_blocks": ["ordered_blocks"],
    f"{MANAGER}.get_num_skipped_tokens": ["num_computed_tokens"],
    f"{ENCODER_CACHE}.free": ["request"],
    f"{ENCODER_CACHE}.free_encoder_input": ["request", "input_id"],
    # requests.py
    "vllm.multimodal.registry:MultiModalRegistry.create_processor": ["model_config"],
    "vllm.multimodal.processing:BaseMultiModalProcessor._get_mm_fields_config": [
        "hf_inputs",
        "hf_processor_mm_kwargs",
    ],
    "vllm.multimodal.inputs:MultiModalKwargsItems.from_hf_inputs": ["hf_inputs", "config_by_key"],
    # minicpmo.py
    "vllm.multimodal.registry:MultiModalRegistry.register_processor": ["processor", "info", "dummy_inputs"],
    "vllm.multimodal.processing:BaseMultiModalProcessor.get_dummy_mm_inputs": ["mm_counts"],
    "vllm.multimodal.processing:BaseProcessingInfo.get_supported_mm_limits": [],
    "vllm.multimodal.processing:BaseProcessingInfo.get_mm_max_tokens_per_item": ["seq_len", "mm_counts"],
    "vllm.multimodal.inputs:MultiModalFieldConfig.batched": ["modality"],
    "vllm.inputs:mm_input": ["prompt_token_ids", "mm_kwargs", "mm_hashes", "mm_placeholders"],
    "vllm.model_executor.models.interfaces:SupportsMultiModal._mark_language_model": ["vllm_config"],
    "vllm.model_executor.models.interfaces:SupportsMultiModal._mark_tower_model": [
        "vllm_config",
        "modalities",
    ],
    "vllm.model_executor.models.minicpmo:MiniCPMWhisperEncoder.__init__": ["config"],
    "vllm.model_executor.models.minicpmo:MiniCPMWhisperEncoderLayer.forward": [
        "hidden_states",
        "attention_mask",
    ],
    "vllm.model_executor.models.minicpmo:MultiModalProjector.__init__": ["in_dim", "out_dim"],
    "vllm.model_executor.models.qwen2:Qwen2ForCausalLM.__init__": ["vllm_config", "prefix"],
    "vllm.model_executor.models.qwen3:Qwen3ForCausalLM.__init__": ["vllm_config", "prefix"],
    "vllm.model_executor.models.utils:AutoWeightsLoader.load_weights": ["weights", "mapper"],
}

# class -> fields we set or read
FIELDS: dict[str, list[str]] = {
    "vllm.engine.arg_utils:EngineArgs": [
        "skip_tokenizer_init",
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
        "additional_config",
        "ec_manager_config",
        "attention_config",
        "long_prefill_token_threshold",
        "worker_cls",
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
        "extra_args",
    ],
    "vllm.config.attention:AttentionConfig": ["backend_per_kind"],
    "vllm.config:VllmConfig": ["additional_config", "speculative_config"],
    "vllm.v1.kv_cache_interface:FullAttentionSpec": [
        "block_size",
        "num_kv_heads",
        "head_size",
        "dtype",
        "kv_quant_mode",
        "sliding_window",
        "attention_chunk_size",
        "non_causal",
    ],
    "vllm.v1.kv_cache_interface:KVCacheConfig": ["kv_cache_groups", "num_blocks"],
    "vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs": ["kv_cache_specs"],
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": ["layer_names", "kv_cache_spec"],
    "vllm.v1.core.sched.output:SchedulerOutput": [
        "scheduled_new_reqs",
        "finished_req_ids",
        "new_block_ids_to_zero",
    ],
    "vllm.v1.core.sched.output:NewRequestData": ["req_id", "sampling_params"],
    "vllm.v1.attention.backend:CommonAttentionMetadata": [
        "query_start_loc",
        "seq_lens",
        "num_reqs",
        "num_actual_tokens",
        "max_query_len",
        "max_seq_len",
        "block_table_tensor",
        "slot_mapping",
        "req_idx",
    ],
    "vllm.v1.worker.utils:AttentionGroup": ["metadata_builders"],
    "vllm.v1.worker.gpu.cudagraph_utils:BatchExecutionDescriptor": [
        "cg_mode",
        "num_tokens",
        "num_reqs",
        "uniform_token_count",
        "num_active_loras",
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
        "self.needs_kv_cache_zeroing",
    ],
    f"{REQUEST}.__init__": [
        "self.request_id",
        "self.status",
        "self.max_tokens",
        "self.prompt_token_ids",
        "self.num_computed_tokens",
        "self.num_output_placeholders",
        "self.num_in_flight_tokens",
        "self.sampling_params",
        "self.num_prompt_tokens",
        "self._all_token_ids",
        "self._output_token_ids",
        "self.all_token_ids = ConstantList(self._all_token_ids)",  # a view: the list is cut in place
        "self.mm_features",
    ],
    # compaction/parked.py: an updated session comes to the workers with all it holds, as if it were new
    f"{SCHEDULER}._update_request_as_session": [
        "del session._all_token_ids[num_computed_tokens:]",
        "session.prompt_token_ids.extend(kept_output_tokens)",
        "base = session.num_tokens",  # features are counted from the record as it is then
        "session.status = RequestStatus.WAITING",
    ],
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_streaming_request": [
        "req_state.prompt_token_ids = new_req_data.prompt_token_ids",
        "req_state.block_ids = new_req_data.block_ids",
        "req_state.num_computed_tokens = new_req_data.num_computed_tokens",
        "self._init_mrope_positions(req_state)",
    ],
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.add_requests": [
        "self._remove_request(req_id)",
        "all_token_ids=new_req_data.prefill_token_ids",
        "overwrite=True",
    ],
    "vllm.v1.core.kv_cache_manager:KVCacheManager.__init__": ["self.block_pool"],
    "vllm.v1.core.block_pool:BlockPool.__init__": ["self.num_gpu_blocks"],
    f"{ENCODER_CACHE}.__init__": [
        "self.cache_size",
        "self.num_free_slots",
        "self.cached",
        "self.num_embeds_by_hash",
        "self.freeable",
        "self.freed",
    ],
    # behaviour we build on, where a silent change would break sessions
    f"{SCHEDULER}._handle_stopped_request": [
        "num_output_placeholders",  # a parked session keeps only what is computed
        "RequestStatus.WAITING_FOR_STREAMING_REQ",
        "self._enqueue_waiting_request(request)",  # the one door into the queues, which we hold
    ],
    f"{SCHEDULER}.add_request": ["self._update_request_as_session(existing, update)"],
    f"{SCHEDULER}.get_num_unfinished_requests": ["num_waiting -= self.num_waiting_for_streaming_input"],
    f"{SCHEDULER}.finish_requests": ["self.num_waiting_for_streaming_input -= 1"],
    f"{SCHEDULER}.schedule": [
        "self.num_waiting_for_streaming_input",
        "self._preempt_request(",
        "num_running, num_waiting = self.get_request_counts()",  # a lone request is not cut into chunks
        "self.scheduler_config.long_prefill_token_threshold",
    ],
    f"{SCHEDULER}._get_new_block_ids_to_zero": ["if not self.needs_kv_cache_zeroing"],
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.__init__": [
        "self.req_to_blocks",
        "self.num_cached_block",
        "self.max_admission_blocks_per_request",
        "self._record_new_block_ids",
    ],
    "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots": [
        "total_computed_tokens - request.num_in_flight_tokens",  # freed by what is done, not by what runs
    ],
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.__init__": ["self.single_type_managers"],
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder.__init__": [
        "self.block_size",
        "self.kv_cache_spec",
    ],
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.__init__": ["self.attn_groups", "self.input_batch"],
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states": [
        "scheduler_output.new_block_ids_to_zero"
    ],
    "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager.__init__": [
        "self.max_num_reqs",
        "self.cudagraph_mode",
        "self.decode_query_len",
        "self.lora_capture_cases",
        "self._candidates",
        "self._capture_descs",
    ],
    "vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager.capture": [
        "max_query_len=desc.max_query_len or desc.uniform_token_count",  # 1: no launch for chunks
    ],
    "vllm.v1.worker.gpu.cudagraph_utils:prepare_inputs_to_capture": ["max_query_len = num_tokens"],
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.__init__": ["self.cudagraph_manager"],
    "vllm.v1.worker.gpu.states:RequestState.__init__": ["self.index_to_req_id"],
    "vllm.v1.worker.gpu.model_states.default:DefaultModelState.prepare_attn": [
        "req_idx=input_batch.idx_mapping_np"
    ],
    # the KV caches and the angles of keys that compaction moves
    "vllm.model_executor.layers.linear:LinearBase.__init__": ["self.input_size", "self.output_size"],
    "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbeddingBase.__init__": [
        "self.head_size",
        "self.rotary_dim",
        "self.is_neox_style",
        'self.register_buffer("cos_sin_cache", cache',
    ],
    "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbeddingBase._compute_cos_sin_cache": [
        "torch.cat((cos, sin), dim=-1)"
    ],
    "vllm.model_executor.layers.rotary_embedding.mrope:MRotaryEmbedding.__init__": ["self.mrope_section"],
    "vllm.model_executor.layers.attention.attention:Attention.__init__": [
        "self.head_size",
        "self.kv_cache_dtype",
        "self.dtype",
        "compilation_config.static_forward_context[prefix] = self",
    ],
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder._set_isa_to_layers": [
        "layer.isa = self.isa"
    ],
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward": [
        "kv_cache = kv_cache.view((num_blocks, num_kv_heads, block_size * 2, -1))",  # keys, then values
        "key_cache, value_cache = kv_cache.chunk(2, dim=2)",
    ],
    "vllm.v1.worker.utils:bind_kv_cache_to_layers": ["forward_context[layer_name].bind_kv_cache(kv_cache)"],
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner.initialize_kv_cache": [
        "self.kv_cache_config = kv_cache_config"
    ],
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.initialize_kv_cache": [
        "self.kv_cache_config = kv_cache_config"
    ],
    "vllm.v1.worker.utils:customize_attention_spec": ["backend.customize_spec(spec)"],
    "vllm.model_executor.models.minicpmo:MiniCPMWhisperEncoderLayer.forward": ["outputs = (hidden_states,)"],
    "vllm.platforms.cpu:CpuPlatform.get_attn_backend_cls": ["AttentionBackendEnum.CPU_ATTN.get_path()"],
    "vllm.v1.core.sched.utils:check_stop": ["request.num_output_tokens >= request.max_tokens"],
}

MEMBERS: dict[str, list[str]] = {
    "vllm.v1.request:RequestStatus": ["WAITING_FOR_STREAMING_REQ", "RUNNING"],
    "vllm.v1.engine:FinishReason": ["STOP", "LENGTH"],
    "vllm.usage.usage_lib:UsageContext": ["ENGINE_CONTEXT"],
    REQUEST: ["num_output_tokens"],
    "vllm.config:ModelConfig": ["is_hybrid", "use_mla"],
    "vllm.config:VllmConfig": ["max_concurrent_batches"],
    "vllm.config:ParallelConfig": ["world_size"],
    "vllm.config:CacheConfig": ["enable_prefix_caching"],
    "vllm.config:SchedulerConfig": ["max_num_batched_tokens"],
    "vllm.config:DeviceConfig": ["device_type"],
    "vllm.v1.attention.backends.registry:AttentionBackendEnum": ["CPU_ATTN", "CUSTOM"],
    "vllm.v1.attention.backend:AttentionCGSupport": ["ALWAYS"],
    "vllm.config.compilation:CUDAGraphMode": ["FULL"],
    "vllm.v1.kv_cache_interface:KVCacheSpecKind": ["FULL_ATTENTION"],
    "vllm.v1.kv_cache_interface:FullAttentionSpec": ["page_size_bytes"],
    "vllm.model_executor.models.registry:_ModelRegistry": ["models"],
    "vllm.multimodal.processing:BaseMultiModalProcessor": ["requires_tokenizer"],
    "vllm.model_executor.models.qwen3:Qwen3ForCausalLM": ["packed_modules_mapping"],
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
