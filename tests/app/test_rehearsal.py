"""What the server rehearses before it says that it is ready, and that no figure counts it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from app.server import rehearsal_on
from engine.null import NullEngine
from engine.scheduler import MAX_BATCH
from engine.types import Work
from tests.support.serving import serving


class Recorder(NullEngine):
    """Notes which sessions it was given work of."""

    def __init__(self) -> None:
        super().__init__()
        self.sessions: set[str] = set()

    def submit(self, batch: Sequence[Work]) -> None:
        self.sessions |= {work.session_id for work in batch}
        super().submit(batch)


@pytest.mark.parametrize(("device", "num_sessions"), [("cpu", 1), ("cuda", 1 + MAX_BATCH + 1)])
async def test_a_gpu_rehearses_its_largest_batch_and_nothing_is_counted(device: str, num_sessions: int):
    engine = Recorder()
    async with serving(make_engine=lambda: engine, rehearsal=rehearsal_on(device)) as server:
        await server.until_empty()
        assert len(engine.sessions) == num_sessions
        capacity: dict[str, Any] = (await server.get("/capacity")).json()
        assert (capacity["admitted"], capacity["active"], capacity["misses"]) == (0, 0, 0)
        assert capacity["lateness"]["samples"] == 0
        metrics = (await server.get("/metrics")).text
        for name in ("input_audio_seconds", "tokens", "interruptions"):
            assert f"metronome_{name}_total 0.0" in metrics
