"""The two kinds of sessions that endless_day.py drives: ours, and vLLM's own streaming sessions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.endless_day_plans import Chunk
from engine.models.family import EngineRecipe
from engine.types import Features, Finish, Work
from engine.vllm.settings import VllmSettings, engine_arguments

MAX_STEPS = 1000  # of one tick


class Broken(Exception):
    """The sessions do not go on."""


class _Sessions:
    """Works are built alike for both."""

    def __init__(self, num_head_tokens: int) -> None:
        self._num_head_tokens, self._seq = num_head_tokens, 0
        self._head = tuple(range(5, 5 + num_head_tokens))
        self._owed: dict[str, tuple[int, ...]] = {}

    def _work(self, name: str, chunk: Chunk, max_tokens: int) -> Work:
        tokens, features = chunk
        before = self._owed.get(name, self._head)
        self._seq += 1
        shifted = tuple(Features(f.offset + len(before), f.num_tokens, f.tensors) for f in features)
        return Work(
            name,
            0,
            self._seq,
            (*before, *tokens),
            features=shifted,
            num_head_tokens=self._num_head_tokens,
            max_tokens=max_tokens,
        )


class Ours(_Sessions):
    """`SessionCore` as the server uses it."""

    def __init__(self, recipe: EngineRecipe, settings: VllmSettings, num_head_tokens: int) -> None:
        from engine.vllm.core import SessionCore
        from engine.vllm.loading import load

        super().__init__(num_head_tokens)
        self._core = SessionCore(load(recipe, settings), recipe.modality, recipe.layout)
        self._ages: dict[str, int] = {}
        if self._core.limits.max_session_tokens is not None:
            raise Broken("this engine's sessions have an end")
        self.max_model_len = self._core._scheduler.max_model_len

    def tick(self, chunks: Mapping[str, Chunk], max_tokens: int) -> None:
        for name, chunk in chunks.items():
            self._core.submit(self._work(name, chunk, max_tokens))
        waiting = set(chunks)
        said: dict[str, tuple[int, ...]] = dict.fromkeys(chunks, ())
        while waiting:
            self._core.step()
            for result in self._core.take_results():
                if result.finish is Finish.REFUSED:
                    raise Broken(result.error)
                self._ages[result.session_id] = result.num_kv_tokens
                said[result.session_id] += result.token_ids
                if result.finish is not None:
                    waiting.discard(result.session_id)
                    self._owed[result.session_id] = said[result.session_id][-1:]

    def lengths(self) -> tuple[int, int]:
        """Of the longest session: entries of its block table, tokens in its list."""
        return _lengths(self._core._scheduler)

    def num_tokens(self) -> int:
        return max(self._ages.values(), default=0)


class Stock(_Sessions):
    """vLLM's EngineCore and scheduler as they come, fed with the same resumable requests."""

    def __init__(self, recipe: EngineRecipe, settings: VllmSettings, num_head_tokens: int) -> None:
        from engine.vllm.loading import config_of, core_of, register_models
        from engine.vllm.requests import RequestBuilder

        super().__init__(num_head_tokens)
        register_models(recipe.model_dir)
        arguments = engine_arguments(recipe, settings, None)  # None: vLLM's own
        arguments.pop("ec_manager_config", None)
        config = config_of(arguments)
        self._core = core_of(config)
        self._builder = RequestBuilder(config, recipe.modality)
        self._scheduler: Any = self._core.scheduler
        self.max_model_len = self._scheduler.max_model_len

    def tick(self, chunks: Mapping[str, Chunk], max_tokens: int) -> None:
        for name, chunk in chunks.items():
            work = self._work(name, chunk, max_tokens)
            request, wave = self._core.preprocess_add_request(self._builder.build(name, work))
            self._core.add_request(request, wave)
        waiting = set(chunks)
        for _ in range(MAX_STEPS):
            outputs, has_run = self._core.step_fn()
            self._core.post_step(has_run)
            for output in (o for client in (outputs or {}).values() for o in client.outputs):
                self._owed[output.request_id] = tuple(output.new_token_ids[-1:])
                if output.finish_reason is not None:
                    waiting.discard(output.request_id)
            if not waiting:
                break
        if waiting:
            raise Broken(f"no end of a turn in {MAX_STEPS} steps")
        if self.num_tokens() > self.max_model_len:
            raise Broken(f"past max_model_len={self.max_model_len} without a word")

    def lengths(self) -> tuple[int, int]:
        return _lengths(self._scheduler)

    def num_tokens(self) -> int:
        return max((request.num_tokens for request in self._scheduler.requests.values()), default=0)


def _lengths(scheduler: Any) -> tuple[int, int]:
    tables = scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
    return (
        max((len(table) for table in tables.values()), default=0),
        max((request.num_tokens for request in scheduler.requests.values()), default=0),
    )
