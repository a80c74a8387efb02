"""A SessionCore driven step by step, so that a test can act between any two."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from engine.types import Features, Finish, Result, Sampling, Work
from engine.vllm.core import SessionCore
from engine.vllm.settings import VllmSettings

SETTINGS = VllmSettings(
    device="cpu",
    max_sessions=24,
    max_session_tokens=255,  # 256 with the token that is sampled last: 8 blocks
    max_batch_tokens=64,  # small, so that chunks take several steps
    kv_cache_bytes=16 << 20,
    block_size_tokens=32,
)
MAX_STEPS = 400


class Stepper:
    """Numbers works, collects results by session, and knows what must be left when all have ended."""

    def __init__(self, core: SessionCore) -> None:
        self.core = core
        self.scheduler = core._scheduler
        self._seq = 0
        self.opened: set[tuple[str, int]] = set()
        self.results: dict[str, list[Result]] = {}

    def start_test(self) -> None:
        self.opened.clear()
        self.results.clear()
        self.core._gone.clear()

    def work(
        self,
        session: str,
        tokens: Iterable[int],
        max_tokens: int = 0,
        *,
        generation: int = 0,
        features: Sequence[Features] = (),
        sampling: Sampling | None = None,
    ) -> Work:
        self._seq += 1
        return Work(
            session,
            generation,
            self._seq,
            tuple(tokens),
            features=tuple(features),
            max_tokens=max_tokens,
            sampling=sampling or Sampling(),
        )

    def submit(self, *works: Work) -> None:
        for work in works:
            self.opened.add((work.session_id, work.generation))
            self.core.submit(work)
        self._collect()

    def step(self) -> None:
        self.core.step()
        self._collect()

    def cancel(self, session: str) -> None:
        self.core.cancel(session, 0)
        self._collect()

    def end(self, session: str, generation: int = 0) -> None:
        self.core.end(session, generation)

    def step_until(self, condition: Callable[[], bool]) -> None:
        for _ in range(MAX_STEPS):
            if condition():
                return
            self.step()
        raise AssertionError(f"not reached within {MAX_STEPS} steps")

    def run(self, *works: Work) -> list[Finish]:
        """Submit and step until all of them finished; how they did, in order."""
        self.submit(*works)
        self.step_until(lambda: all(self.final(work) for work in works))
        finished = [self.final(work) for work in works]
        return [result.finish for result in finished if result is not None and result.finish is not None]

    def run_idle(self) -> None:
        self.step_until(lambda: not self.core.has_work())

    def final(self, work: Work) -> Result | None:
        finals = [r for r in self.of(work) if r.finish is not None]
        assert len(finals) <= 1, f"more than one final result: {finals}"
        return finals[0] if finals else None

    def of(self, work: Work) -> list[Result]:
        return [r for r in self.results.get(work.session_id, []) if r.seq == work.seq]

    def tokens(self, work: Work) -> list[int]:
        return [token for result in self.of(work) for token in result.token_ids]

    def end_all(self) -> None:
        for session, generation in self.opened:
            self.core.end(session, generation)
        self.run_idle()

    def check_empty(self) -> None:
        """No session, no block, no record of a request is left anywhere in vLLM."""
        core, scheduler = self.core, self.scheduler
        assert core.stats().kv_blocks_used == 0
        assert core.stats().num_sessions == 0
        assert not core._by_request
        assert not scheduler.requests
        assert not scheduler.parked
        assert not scheduler.running
        assert not scheduler.waiting
        assert not scheduler.kv_holding_waiting
        assert not scheduler.deferred_waiting
        assert scheduler.num_waiting_for_streaming_input == 0
        assert scheduler.get_num_unfinished_requests() == 0
        for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
            assert not any(manager.req_to_blocks.values())
        runner = core._core.model_executor.driver_worker.worker.model_runner  # pyright: ignore[reportAttributeAccessIssue]
        if hasattr(runner, "req_states"):  # runner V2
            assert not runner.req_states.req_id_to_index
        else:
            assert not runner.requests
            assert not runner.input_batch.req_id_to_index

    def _collect(self) -> None:
        for result in self.core.take_results():
            self.results.setdefault(result.session_id, []).append(result)
