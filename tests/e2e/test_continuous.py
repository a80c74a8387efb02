"""Continuous mode over real sockets: audio embeddings stream into one live vLLM request, tick by tick.

The family is Ultravox with random weights (tests/support): what it says means nothing, how it runs is real.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from engine.rehearsal import rehearse
from engine.vllm.engine import VllmEngine
from engine.vllm.environment import prepare_process, repair_torch_companions
from engine.vllm.settings import VllmSettings
from tests.support.serving import Serving, serving
from tests.support.speech import recording, speak

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    prepare_process("cpu")
    repair_torch_companions()
    from tests.support.ultravox_checkpoint import build
    from tests.support.ultravox_family import TinyUltravox

    model_dir: Path = build(tmp_path_factory.mktemp("models") / "tiny-ultravox")
    family = TinyUltravox(model_dir)
    settings = VllmSettings(max_sessions=5, kv_cache_bytes=1 << 27)
    async with serving(family, lambda: VllmEngine(family.engine_recipe(), settings), rehearse) as running:
        yield running


async def test_sessions_stream_audio_side_by_side_and_decode_in_every_tick(server: Serving):
    async def talk(name: str) -> list[dict]:
        samples, rate = recording(name)
        async with server.client(sample_rate=rate) as client:
            listener = asyncio.create_task(client.closed())
            await speak(client, samples[: 7 * rate], rate, silence_s=0.5)
            await client.socket.close()
            await listener
            return client.events

    events = await asyncio.gather(talk("jfk.flac"), talk("austen-0870.wav"), talk("jfk.flac"))
    for session in events:
        assert session[0]["turn"] == "continuous"
        ticks = [e for e in session if e["type"] == "tick" and e["audio_ms"]]
        assert len(ticks) >= 3
        assert [t["kv_tokens"] for t in ticks] == sorted(t["kv_tokens"] for t in ticks)
        assert all(e["type"] != "error" for e in session)
    await server.until_empty()


async def test_a_turn_cannot_be_committed_where_the_model_decides(server: Serving):
    async with server.client() as client:
        await client.say(type="input.commit")
        assert (await client.until("error"))["code"] == "wrong_turn_mode"
