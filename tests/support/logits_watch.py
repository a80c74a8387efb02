"""The logits that a running engine computes, under either of vLLM's model runners."""

from __future__ import annotations

from typing import Any


class LogitsWatch:
    """Each step's last logits of one session, by the number of its tokens that were done, evicted included.

    It counts from when it is made: make it before the session's first compaction. A step that asynchronous
    scheduling ran in vain is overwritten by the real one at the same position. Copying waits for the device,
    so nothing is to be timed beside it.
    """

    def __init__(self, core: Any, session: str = "a") -> None:
        """`core` is the `SessionCore`."""
        self.logits: dict[int, Any] = {}  # float32 [vocabulary] on the CPU
        self.num_evicted = self.num_moves = 0
        self._worker = worker = core._core.model_executor.driver_worker.worker
        self._own = f"{session}:"  # begins the ids of its requests
        self._runner = worker.model_runner
        self._ends: dict[str, int] = {}  # of the step that runs
        self._rows: list[str] | None = None
        self._execute, self._compute = worker.execute_model, self._runner.model.compute_logits
        worker.execute_model, self._runner.model.compute_logits = self._on_execute, self._on_logits
        if hasattr(self._runner, "sample"):  # runner V2, which orders each batch anew
            self._sample = self._runner.sample
            self._runner.sample = self._on_sample

    def close(self) -> None:
        """Watch no longer. Several of one engine are closed in any order, together."""
        for watched, name in (
            (self._worker, "execute_model"),
            (self._runner.model, "compute_logits"),
            (self._runner, "sample"),
        ):
            vars(watched).pop(name, None)

    def _on_execute(self, scheduled: Any) -> Any:
        from engine.vllm.compaction.worker import attached_moves

        for move in attached_moves(scheduled):
            if move.request_id.startswith(self._own):
                self.num_evicted += move.distance_tokens
                self.num_moves += 1
        cached = scheduled.scheduled_cached_reqs
        starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        starts |= {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        self._ends = {name: starts[name] + size for name, size in scheduled.num_scheduled_tokens.items()}
        return self._execute(scheduled)

    def _on_sample(self, hidden_states: Any, input_batch: Any, *args: Any) -> Any:
        self._rows = list(input_batch.req_ids)
        return self._sample(hidden_states, input_batch, *args)

    def _on_logits(self, hidden_states: Any, *args: Any) -> Any:
        logits = self._compute(hidden_states, *args)
        for row, name in enumerate(self._rows or self._runner.input_batch.req_ids):
            if name.startswith(self._own):
                self.logits[self.num_evicted + self._ends[name]] = logits[row].float().cpu()
        return logits
