"""The engine's options, checked before anything is loaded; every error names the option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from engine.models.family import EngineRecipe
from engine.vllm.compaction.options import CompactionOptions, compacted_len
from engine.vllm.sink_window.options import SinkWindowOptions

_WORKERS = {
    "cpu": "engine.vllm.sink_window.cpu.SinkWindowCPUWorker",
    "cuda": "engine.vllm.sink_window.cuda.SinkWindowGPUWorker",
}
_ENCODER_CACHE = "engine.vllm.compaction.encoder_cache.PromptEncoderCacheManager"
MAX_GRAPH_TOKENS = 2048
MIN_SLACK_TOKENS = 64
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """How one engine runs; what it runs is the family's `EngineRecipe`.

    Raises ValueError naming the option and its range.
    """

    device: Literal["cpu", "cuda"] = "cpu"
    max_sessions: int = 32  # request slots; a parked session occupies one
    max_session_tokens: int | None = None  # None: no end where sessions are compacted, else as trained
    max_batch_tokens: int = 2048  # of one step; longer chunks are taken in over several
    kv_cache_bytes: int | None = None  # needed on the CPU; on CUDA None means by gpu_memory_utilization
    gpu_memory_utilization: float = 0.85  # part of the GPU's memory for weights, activations and KV cache
    block_size_tokens: int | None = None  # None: 16 where windowed, else vLLM's choice
    dtype: str | None = None  # None: the recipe's
    eager: bool | None = None  # no compilation, no CUDA graphs; None: on the CPU only
    seed: int = 0
    kv: Literal["windowed", "unbounded"] = "windowed"  # what sessions keep: sinks and window, or all
    window_tokens: int = 1024  # W, the query's own token counted
    max_sink_tokens: int = 256  # cap on S, a session's first tokens, which stay for ever
    max_chunk_tokens: int = 256  # of one session in one step; with W and S it bounds what a session holds
    compaction_slack_tokens: int = 512  # freed tokens at which a windowed session is compacted; 0: never
    weights: Literal["checkpoint", "fp8"] = "checkpoint"  # fp8: quantised while they are loaded
    kv_dtype: Literal["model", "fp8"] = "model"  # of the KV cache; fp8 (e4m3) halves what a session holds

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device={self.device!r}: must be 'cpu' or 'cuda'")
        for name, low, high in (
            ("max_sessions", 1, 65_536),
            ("max_session_tokens", 16, 16_777_216),
            ("max_batch_tokens", 16, 1_048_576),
            ("kv_cache_bytes", 1, 1 << 50),
            ("block_size_tokens", 16, 1024),
            ("window_tokens", 1, 16_777_216),
            ("max_sink_tokens", 0, 1_048_576),
            ("max_chunk_tokens", 16, 1_048_576),
            ("compaction_slack_tokens", 0, 1_048_576),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name}={value}: must be from {low} to {high}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(f"gpu_memory_utilization={self.gpu_memory_utilization}: must be in (0, 1]")
        if self.block_size_tokens is not None and self.block_size_tokens % 16:
            raise ValueError(f"block_size_tokens={self.block_size_tokens}: must be a multiple of 16")
        if 0 < self.compaction_slack_tokens < MIN_SLACK_TOKENS:
            raise ValueError(
                f"compaction_slack_tokens={self.compaction_slack_tokens}: must be 0 (never) or at least "
                f"{MIN_SLACK_TOKENS}: an item of audio has to fit into it"
            )
        if self.kv not in ("windowed", "unbounded"):
            raise ValueError(f"kv={self.kv!r}: must be 'windowed' or 'unbounded'")
        if self.dtype not in (None, *_DTYPES):
            raise ValueError(f"dtype={self.dtype!r}: must be one of {', '.join(_DTYPES)}")
        for name, usual in (("weights", "checkpoint"), ("kv_dtype", "model")):
            value = getattr(self, name)
            if value not in (usual, "fp8"):
                raise ValueError(f"{name}={value!r}: must be {usual!r} or 'fp8'")
            if value == "fp8" and self.device == "cpu":
                raise ValueError(f"{name}='fp8' needs a GPU: use {usual!r} on the CPU")
        if self.device == "cpu":
            if self.kv_cache_bytes is None:
                raise ValueError("kv_cache_bytes: must be set on the CPU, where no device memory bounds it")

    @property
    def is_async(self) -> bool:
        """Whether vLLM schedules a step while the one before it still runs."""
        return self.device == "cuda"

    @property
    def sink_window(self) -> SinkWindowOptions | None:
        """None: unbounded."""
        if self.kv == "unbounded":
            return None
        return SinkWindowOptions(self.window_tokens, self.max_sink_tokens, self.max_chunk_tokens)


def compaction(recipe: EngineRecipe, settings: VllmSettings) -> CompactionOptions | None:
    """None: sessions keep their positions, and end at `max_model_len`."""
    if settings.sink_window is None or settings.compaction_slack_tokens == 0:
        return None
    if _compacted_len(settings) >= _bounded_len(recipe, settings):
        return None  # the cap comes first, or the model was not trained for so wide a window
    return CompactionOptions(settings.compaction_slack_tokens, settings.max_session_tokens)


def max_model_len(recipe: EngineRecipe, settings: VllmSettings) -> int:
    """vLLM's limit: a session's tokens, and the one it samples last, which stays outside the KV cache."""
    if compaction(recipe, settings) is not None:
        return _compacted_len(settings)
    return _bounded_len(recipe, settings)


def _bounded_len(recipe: EngineRecipe, settings: VllmSettings) -> int:
    cap = settings.max_session_tokens
    if cap is None or cap >= recipe.max_session_tokens:
        return recipe.max_session_tokens
    return cap + 1


def _compacted_len(settings: VllmSettings) -> int:
    block_size = settings.block_size_tokens or 16
    needed = compacted_len(
        settings.max_sink_tokens, settings.window_tokens, settings.compaction_slack_tokens, block_size
    )
    return -(-needed // block_size) * block_size


def engine_arguments(
    recipe: EngineRecipe, settings: VllmSettings, scheduler_cls: type | None
) -> dict[str, Any]:
    """Keyword arguments for vLLM's EngineArgs; the recipe's overrides win."""
    eager = settings.eager if settings.eager is not None else settings.device == "cpu"
    arguments: dict[str, Any] = {
        "model": str(recipe.model_dir),
        "dtype": settings.dtype or recipe.dtype,
        "load_format": recipe.load_format,
        "max_model_len": max_model_len(recipe, settings),
        "max_num_seqs": settings.max_sessions,
        "max_num_batched_tokens": settings.max_batch_tokens,
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "block_size": settings.block_size_tokens,
        "enforce_eager": eager,
        "seed": settings.seed,
        "enable_prefix_caching": False,  # a session's KV is its own; and hashes would be kept for ever
        "enable_chunked_prefill": True,
        "async_scheduling": settings.is_async,
        "scheduler_cls": scheduler_cls,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if settings.weights == "fp8":
        arguments["quantization"] = "fp8"
    if settings.kv_dtype == "fp8":
        arguments["kv_cache_dtype"] = "fp8"
    if not eager:
        compilation: dict[str, Any] = {"cudagraph_capture_sizes": graph_sizes(settings.max_batch_tokens)}
        if settings.sink_window is not None and settings.device == "cuda":
            compilation["cudagraph_mode"] = "FULL"  # attention too; by default vLLM cuts mixed steps at it
        arguments["compilation_config"] = compilation
    if recipe.modality is not None:
        others = {"image", "video", "audio"} - {recipe.modality}
        arguments["limit_mm_per_prompt"] = {recipe.modality: 1} | dict.fromkeys(others, 0)
        arguments["mm_processor_cache_gb"] = 0  # features are made by the family; nothing comes twice
        arguments["ec_manager_config"] = {"encoder_cache_manager_cls": _ENCODER_CACHE}
    if settings.sink_window is not None:
        arguments |= _window_arguments(settings.sink_window, recipe, settings)
    return arguments | recipe.overrides


def graph_sizes(max_batch_tokens: int) -> list[int]:
    """Numbers of tokens in a step for which a CUDA graph is captured; a step is padded to the next one.

    vLLM stops at 512. Here a step is mostly mixed: all who answer, and the chunks of those who talk; without
    a graph such a step waits for the host.
    """
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, MAX_GRAPH_TOKENS + 1, 64)]
    return [size for size in sizes if size <= max_batch_tokens]


def _window_arguments(
    options: SinkWindowOptions, recipe: EngineRecipe, settings: VllmSettings
) -> dict[str, Any]:
    compacted = compaction(recipe, settings)
    arguments: dict[str, Any] = {
        "additional_config": options.as_additional_config()
        | ({} if compacted is None else compacted.as_additional_config()),
        "block_size": settings.block_size_tokens or 16,
        "long_prefill_token_threshold": min(options.max_chunk_tokens, max_model_len(recipe, settings)),
        "worker_cls": _WORKERS[settings.device],
    }
    if settings.device == "cuda":  # by kind: layers that slide, cross or encode keep vLLM's choice
        arguments["attention_config"] = {"backend_per_kind": {"full_attention": "CUSTOM"}}
    return arguments
