"""A family that makes features of a wrong shape for one session: it ends, over real sockets, and no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from engine.rehearsal import rehearse
from engine.types import SAMPLE_RATE, Hearing, Intake
from engine.vllm.engine import VllmEngine
from engine.vllm.environment import prepare_process, repair_torch_companions
from engine.vllm.settings import VllmSettings
from tests.support.serving import Serving, serving
from tests.support.ultravox_family import TinyUltravox

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]


class LosesABin(TinyUltravox):
    """Of very loud audio, one mel bin is missing; and it is heard together with all others."""

    def hear(self, batch: Sequence[Hearing]) -> list[Intake]:
        intakes = super().hear(batch)
        return [
            self._spoilt(intake) if np.abs(hearing.audio).max(initial=0.0) > 0.9 else intake
            for hearing, intake in zip(batch, intakes, strict=True)
        ]

    @staticmethod
    def _spoilt(intake: Intake) -> Intake:
        def cut(tensors: Any) -> dict[str, Any]:
            return {**tensors, "audio_features": tensors["audio_features"][:, 1:]}

        return replace(intake, features=tuple(replace(f, tensors=cut(f.tensors)) for f in intake.features))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    prepare_process("cpu")
    repair_torch_companions()
    from tests.support.ultravox_checkpoint import build

    family = LosesABin(build(tmp_path_factory.mktemp("models") / "tiny-ultravox"))
    settings = VllmSettings(max_sessions=5, kv_cache_bytes=1 << 27)
    async with serving(family, lambda: VllmEngine(family.engine_recipe(), settings), rehearse) as running:
        yield running


async def test_a_session_with_features_of_a_wrong_shape_ends_alone(server: Serving):
    def tone(level: float) -> bytes:
        wave = 32767 * level * np.sin(np.arange(SAMPLE_RATE // 2) * 0.3)
        return wave.astype("<i2").tobytes()

    async def talk(level: float, seconds: float) -> tuple[list[dict[str, Any]], int]:
        async with server.client(sample_rate=SAMPLE_RATE) as client:
            listener = asyncio.create_task(client.closed())
            for _ in range(round(2 * seconds)):
                if listener.done():
                    break
                await client.audio(tone(level))
                await asyncio.sleep(0.5)
            await client.socket.close()
            code, _ = await listener
            return client.events, code

    (bad, bad_code), *others = await asyncio.gather(talk(0.99, 6.0), talk(0.3, 6.0), talk(0.2, 6.0))
    error = next(event for event in bad if event["type"] == "error")
    assert (error["code"], bad_code) == ("session_failed", 1011)
    assert "audio_features is float32" in error["message"]
    for events, _ in others:
        assert all(event["type"] != "error" for event in events)
        assert sum(event["type"] == "tick" and event["audio_ms"] > 0 for event in events) >= 3
    assert server.service.conductor.num_engine_failures == 0
    await server.until_empty()
