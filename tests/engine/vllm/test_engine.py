"""The engine on its thread: start, results, cancel, end, death and a second life in the same process."""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from engine.engine import EngineError
from engine.types import Finish, Result, Work

pytestmark = pytest.mark.vllm

PROMPT = tuple(range(10, 30))
TIMEOUT_S = 30.0


class Client:
    """Starts an engine and waits for what it says."""

    def __init__(self, recipe, settings) -> None:
        from engine.vllm.engine import VllmEngine

        self.engine = VllmEngine(recipe, settings)
        self.results: queue.Queue[Result] = queue.Queue()
        self.failures: queue.Queue[EngineError] = queue.Queue()
        self.threads: set[str] = set()

    def start(self) -> None:
        self.engine.start(self._on_results, self.failures.put)

    def _on_results(self, results) -> None:
        self.threads.add(threading.current_thread().name)
        for result in results:
            self.results.put(result)

    def until_final(self, session: str) -> list[Result]:
        """The session's results up to its work's last; others' are put aside."""
        mine: list[Result] = []
        while not mine or mine[-1].finish is None:
            result = self.results.get(timeout=TIMEOUT_S)
            if result.session_id == session:
                mine.append(result)
        return mine

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.005)


@pytest.fixture(scope="module")
def running(family) -> Iterator[Client]:
    from tests.engine.vllm.stepper import SETTINGS

    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    client = Client(family.engine_recipe(), SETTINGS)
    client.start()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    yield client
    client.engine.close()
    client.engine.close()


def work(session: str, seq: int, tokens=PROMPT, max_tokens: int = 5, generation: int = 0) -> Work:
    return Work(session, generation, seq, tuple(tokens), max_tokens=max_tokens)


def test_limits_are_those_of_the_started_engine(running):
    limits = running.engine.limits
    assert limits.max_sessions == 24
    assert limits.max_session_tokens == 255
    assert limits.block_size_tokens == 32
    assert limits.blocks_per_session == 8
    assert limits.max_batch_tokens == 64
    assert limits.num_kv_blocks == (16 << 20) // (32 * 512) - 1


def test_the_warm_up_leaves_nothing(running):
    running.wait_for(lambda: running.engine.stats().num_sessions == 0)
    assert running.engine.stats().kv_blocks_used == 0


def test_a_session_over_several_works(running):
    engine = running.engine
    engine.submit([work("a", 1, max_tokens=0)])
    assert [r.finish for r in running.until_final("a")] == [Finish.FED]
    engine.submit([work("a", 2, (40, 41))])
    results = running.until_final("a")
    assert [len(r.token_ids) for r in results] == [1] * 5
    assert results[-1].finish is Finish.LENGTH
    running.wait_for(lambda: engine.stats().kv_blocks_used == 1)
    assert engine.stats().num_sessions == 1
    assert engine.stats().last_step_s > 0
    engine.end("a", 0)
    running.wait_for(lambda: engine.stats().num_sessions == 0 and engine.stats().kv_blocks_used == 0)
    assert running.threads == {"engine"}


def test_an_idle_engine_takes_no_steps(running):
    engine = running.engine
    engine.submit([work("idle", 1)])
    running.until_final("idle")
    engine.end("idle", 0)
    running.wait_for(lambda: engine.stats().num_sessions == 0)
    engine.cancel("nobody", 0)  # handled, and nothing to do after it
    engine.submit([work("mark", 1, max_tokens=0)])
    running.until_final("mark")
    steps = engine.stats().num_steps
    time.sleep(0.2)
    assert engine.stats().num_steps - steps <= 1  # a step that tells the worker who left may be under way
    engine.end("mark", 0)


def test_cancel_ends_the_answer_and_submit_from_the_callback_thread_order_holds(running):
    engine = running.engine
    engine.submit([work("c", 1, max_tokens=200)])
    first = running.results.get(timeout=TIMEOUT_S)
    assert first.finish is None
    engine.cancel("c", 0)
    results = running.until_final("c")
    assert results[-1].finish is Finish.CANCELLED
    assert len(results) < 150
    said = [first, *results]
    last = [token for result in said for token in result.token_ids][-1]
    engine.submit([work("c", 2, (last, 40), 3)])
    assert running.until_final("c")[-1].finish is Finish.LENGTH
    engine.end("c", 0)


def test_nothing_follows_an_end(running):
    engine = running.engine
    for generation in range(5):
        engine.submit([work("e", generation, max_tokens=200, generation=generation)])
        while running.results.get(timeout=TIMEOUT_S).generation != generation:
            pass
        engine.end("e", generation)
    running.wait_for(lambda: engine.stats().num_sessions == 0)
    engine.submit([work("mark", 9, max_tokens=0, generation=1)])
    running.until_final("mark")
    engine.end("mark", 1)
    running.wait_for(lambda: engine.stats().kv_blocks_used == 0)


def test_refusals_come_as_results(running):
    running.engine.submit([work("bad", 1, ()), work("good", 1)])
    results = {}
    while len(results) < 2:
        result = running.results.get(timeout=TIMEOUT_S)
        if result.finish is not None:
            results[result.session_id] = result.finish
    assert results == {"bad": Finish.REFUSED, "good": Finish.LENGTH}
    running.engine.end("good", 0)


def test_many_sessions_from_many_threads(running):
    engine = running.engine

    def talk(number: int) -> None:
        engine.submit([work(f"t{number}", 1, (20 + number, 21), 8)])

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    finals = {}
    while len(finals) < 20:
        result = running.results.get(timeout=TIMEOUT_S)
        if result.finish is not None:
            finals[result.session_id] = result.finish
    assert set(finals.values()) == {Finish.LENGTH}
    for number in range(20):
        engine.end(f"t{number}", 0)
    running.wait_for(lambda: engine.stats().num_sessions == 0)


def test_an_engine_starts_once(running):
    with pytest.raises(EngineError, match="starts once"):
        running.start()


# last: these close the module's engine


def test_death_in_a_step_is_told_once_and_another_engine_lives_on(running, family, monkeypatch):
    from vllm.v1.worker.gpu_worker import Worker

    from tests.engine.vllm.stepper import SETTINGS

    engine = running.engine
    engine.submit([work("victim", 1, max_tokens=200)])
    running.results.get(timeout=TIMEOUT_S)
    with monkeypatch.context() as patch:
        patch.setattr(Worker, "execute_model", lambda self, scheduled: 1 / 0)  # inside vLLM's own step
        error = running.failures.get(timeout=TIMEOUT_S)
    assert isinstance(error, EngineError)
    assert "the engine died in a step: ZeroDivisionError" in str(error)
    engine.submit([work("late", 1)])
    engine.cancel("victim", 0)
    engine.end("victim", 0)
    engine.close()
    assert not any(thread.name == "engine" for thread in threading.enumerate())
    assert running.failures.empty()

    second = Client(family.engine_recipe(), SETTINGS)
    second.start()
    second.engine.submit([work("victim", 1, generation=1)])
    assert second.until_final("victim")[-1].finish is Finish.LENGTH
    second.engine.close()


def test_a_start_that_cannot_work_says_which_option(running, family):
    from tests.engine.vllm.stepper import SETTINGS

    running.engine.close()
    tiny = Client(family.engine_recipe(), replace(SETTINGS, kv_cache_bytes=1 << 16))
    with pytest.raises(
        EngineError, match=r"kv_cache_bytes=65536 cannot hold one session of max_session_tokens"
    ):
        tiny.start()
    with pytest.raises(EngineError, match="before it is started"):
        _ = tiny.engine.limits
    tiny.engine.close()


def test_a_start_without_a_model_says_so(running, family, tmp_path):
    from tests.engine.vllm.stepper import SETTINGS

    running.engine.close()
    lost = Client(replace(family.engine_recipe(), model_dir=tmp_path), SETTINGS)
    with pytest.raises(EngineError, match=r"config\.json is missing"):
        lost.start()


@pytest.mark.parametrize(
    "change,reason",
    [
        ({"num_tokens": lambda frames: frames // 16 + 1}, "does not make 4 tokens of 56 frames"),
        ({"tensors": {"audio_features": ("float32", (1, 40, None))}}, "of 16 frames"),
        ({"frames": (16, 96 * 1024)}, "an item of 49160 frames is refused: .* grow beyond 255 tokens"),
        (None, "does not say what its audio features are like"),
    ],
    ids=["tokens", "bins", "length", "nothing said"],
)
def test_a_start_whose_features_are_not_as_stated_says_so(running, family, change, reason):
    from tests.engine.vllm.stepper import SETTINGS

    running.engine.close()
    recipe = family.engine_recipe()
    if change is None:
        recipe = replace(recipe, layout=None)
    else:
        tensors = recipe.layout.tensors | change.get("tensors", {})
        recipe = replace(recipe, layout=replace(recipe.layout, **{**change, "tensors": tensors}))
    wrong = Client(recipe, SETTINGS)
    with pytest.raises(EngineError, match=reason):
        wrong.start()
