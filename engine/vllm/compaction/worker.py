"""The device's side of compaction: moves that come with a step are carried out before its forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from engine.vllm.compaction.mover import KeyMover
from engine.vllm.compaction.options import CompactionOptions
from engine.vllm.compaction.parked import Move
from engine.vllm.compaction.rotation import UnmovableKeys

_FIELD = "metronome_moves"


def attach_moves(output: SchedulerOutput, moves: Sequence[Move]) -> None:
    """Send moves along with a step. A step without tokens carries them out as well."""
    setattr(output, _FIELD, tuple(moves))


def attached_moves(output: SchedulerOutput) -> tuple[Move, ...]:
    return getattr(output, _FIELD, ())


class CompactionWorker:
    """Mixin over a vLLM worker."""

    vllm_config: Any
    model_runner: Any
    _mover: KeyMover | None = None
    _unmovable: str | None = None

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        if CompactionOptions.of(self.vllm_config) is None:
            return
        try:
            self._mover = KeyMover(self.model_runner)
        except UnmovableKeys as error:
            self._unmovable = str(error)

    def unmovable_keys(self) -> str | None:
        """Why this model's keys cannot be moved to other positions; None if they can."""
        return self._unmovable

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        moves = attached_moves(scheduler_output)
        if moves:
            # Same stream as the forwards: after all that wrote these keys, before all that will read them.
            assert self._mover is not None
            self._mover.move([(move.block_ids, move.distance_tokens) for move in moves])
        return super().execute_model(scheduler_output)  # type: ignore[misc]
