"""The engine on its thread: vLLM in this process, one owner, commands in and results out."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.engine import EngineError, EngineLimits, EngineStats, OnFailure, OnResults
from engine.models.family import EngineRecipe
from engine.types import Work
from engine.vllm.environment import prepare_process, repair_torch_companions
from engine.vllm.inbox import Inbox, Letter
from engine.vllm.settings import VllmSettings
from engine.vllm.warming import prove, warm_up

if TYPE_CHECKING:
    from engine.vllm.core import SessionCore

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 60.0


class VllmEngine:
    """`engine.engine.Engine` over vLLM. See there for what each method promises.

    Life: start() spawns the thread, which builds the EngineCore, warms it up and then steps it for as long as
    anything is to do, and sleeps otherwise. It ends by close(), or by an exception in a step: then
    `on_failure` is called once and everything but close() does nothing. Another VllmEngine can be started in
    the same process after that (about 3 s on two cores; imports are done only once).
    """

    def __init__(self, recipe: EngineRecipe, settings: VllmSettings) -> None:
        self._recipe = recipe
        self._settings = settings
        self._inbox = Inbox()
        self._limits: EngineLimits | None = None
        self._stats = EngineStats(0, 0, 0, 0.0)
        self._thread: threading.Thread | None = None
        self._started = threading.Event()  # loaded and warm, or failed to
        self._start_error: EngineError | None = None

    @property
    def limits(self) -> EngineLimits:
        if self._limits is None:
            raise EngineError("the engine has no limits before it is started")
        return self._limits

    def stats(self) -> EngineStats:
        return self._stats

    def start(self, on_results: OnResults, on_failure: OnFailure) -> None:
        if self._thread is not None:
            raise EngineError("an engine starts once; make a new one")
        prepare_process(self._settings.device)
        self._thread = threading.Thread(
            target=self._main, args=(on_results, on_failure), name="engine", daemon=True
        )
        self._thread.start()
        self._started.wait()
        if self._start_error is not None:
            self._thread.join()
            raise self._start_error

    def submit(self, batch: Sequence[Work]) -> None:
        self._inbox.submit(batch)

    def cancel(self, session_id: str, generation: int) -> None:
        self._inbox.cancel((session_id, generation))

    def end(self, session_id: str, generation: int) -> None:
        self._inbox.end((session_id, generation))

    def close(self) -> None:
        self._inbox.close()
        if self._thread is None or self._thread is threading.current_thread():
            return
        self._thread.join(_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.error(
                "the engine's step has not returned for %.0f s; its thread is left behind", _CLOSE_TIMEOUT_S
            )

    # on the engine's thread

    def _main(self, on_results: OnResults, on_failure: OnFailure) -> None:
        self._live(on_results, on_failure)
        gc.unfreeze()
        gc.collect()  # the model and its KV cache are cycles; the next engine needs their memory
        if self._settings.device == "cuda":
            sys.modules["torch"].cuda.empty_cache()

    def _live(self, on_results: OnResults, on_failure: OnFailure) -> None:
        core = self._load()
        if core is None:
            return
        failure: EngineError | None = None
        try:
            self._run(core, on_results)
        except Exception as error:
            logger.exception("the engine died in a step")
            failure = _engine_error("the engine died in a step", error)
        self._inbox.close()
        if failure is not None:
            try:
                on_failure(failure)
            except Exception:
                logger.exception("on_failure raised")
        self._shut_down(core)

    def _load(self) -> SessionCore | None:
        core = None
        try:
            recipe = self._recipe
            if recipe.modality is not None and recipe.layout is None:
                raise EngineError(f"the family does not say what its {recipe.modality} features are like")
            repair_torch_companions()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch and vLLM warn of each other's deprecations
                from engine.vllm.core import SessionCore  # here: these import vLLM
                from engine.vllm.loading import load

                core = SessionCore(load(recipe, self._settings), recipe.modality, recipe.layout)
            self._limits = core.limits
            warm_up(core, recipe.samplings)
            if recipe.layout is not None:
                prove(core, recipe.layout)
            gc.collect()
            gc.freeze()  # what is loaded stays: to look through it stops every thread for half a second
        except Exception as error:
            self._start_error = (
                error if isinstance(error, EngineError) else _engine_error("the engine did not start", error)
            )
            logger.debug("the engine did not start", exc_info=True)
            if core is not None:
                self._shut_down(core)
            core = None
        self._started.set()
        return core

    def _run(self, core: SessionCore, on_results: OnResults) -> None:
        while (letters := self._inbox.take(block=not core.has_work())) is not None:
            _apply(letters, core)
            if core.has_work():
                core.step()
            self._stats = core.stats()
            if results := self._inbox.without_ended(core.take_results()):
                on_results(results)

    def _shut_down(self, core: SessionCore) -> None:
        try:
            core.shutdown()
        except Exception:
            logger.exception("vLLM's shutdown failed")


def _apply(letters: list[Letter], core: SessionCore) -> None:
    for letter in letters:  # ends first: what they free may serve those who come
        if letter.end:
            core.end(*letter.key)
    for letter in letters:
        if letter.end:
            continue
        if letter.cancel_running:
            core.cancel(*letter.key)
        for work in (letter.work, letter.surplus):
            if work is not None:
                core.submit(work)
        if letter.cancel_work:
            core.cancel(*letter.key)


def _engine_error(what: str, error: Exception) -> EngineError:
    """Says what happened without holding on to it: a traceback would keep the model alive."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({last[0].name} in {last[0].filename}:{last[0].lineno})" if last else ""
    return EngineError(f"{what}: {type(error).__name__}: {error}{where}")
