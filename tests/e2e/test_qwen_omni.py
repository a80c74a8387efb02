"""The Qwen-Omni thinkers behind real sockets, every turn mode. The weights are random: what they say means
nothing, how they hear and are heard is real.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from engine.rehearsal import rehearse
from engine.vllm.engine import VllmEngine
from engine.vllm.environment import prepare_process, repair_torch_companions
from engine.vllm.settings import VllmSettings
from tests.support import tiny_omni
from tests.support.serving import Serving, serving
from tests.support.speech import recording, speak

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=tiny_omni.NAMES)
async def server(request: pytest.FixtureRequest) -> AsyncIterator[Serving]:
    prepare_process("cpu")
    repair_torch_companions()
    from engine.models import published

    family = published.load(str(tiny_omni.cached(request.param)))
    settings = VllmSettings(max_sessions=5, kv_cache_bytes=1 << 27)
    async with serving(family, lambda: VllmEngine(family.engine_recipe(), settings), rehearse) as running:
        yield running


def ticks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] == "tick" and event["audio_ms"]]


async def test_sessions_stream_side_by_side_and_decode_in_every_tick(server: Serving):
    async def talk(name: str) -> list[dict[str, Any]]:
        samples, rate = recording(name)
        async with server.client(sample_rate=rate, turn="continuous") as client:
            listener = asyncio.create_task(client.closed())
            while len(ticks(client.events)) < 3 and not listener.done():  # however long a busy machine takes
                await speak(client, samples[: 3 * rate], rate, silence_s=0.0)
            await client.socket.close()
            await listener
            return client.events

    for session in await asyncio.gather(talk("jfk.flac"), talk("austen-0870.wav")):
        assert session[0]["turn"] == "continuous" and session[0]["budget_ms"] == 2000
        heard = ticks(session)
        assert len(heard) >= 3
        kv_tokens = [tick["kv_tokens"] for tick in heard]
        assert kv_tokens == sorted(kv_tokens) and kv_tokens[-1] - kv_tokens[0] >= 20 * (len(heard) - 1)
        assert all(event["type"] != "error" for event in session)
    await server.until_empty()


async def test_an_answer_follows_speech_and_the_next_turn_the_answer(server: Serving):
    samples, rate = recording("austen-0880.wav")
    async with server.client(sample_rate=rate, turn="server_vad", max_tokens=24) as client:
        for _ in range(2):
            await speak(client, samples, rate, silence_s=1.2)
            await client.until("response.done")
            assert client.events[-1]["reason"] in ("stop", "length")
        kinds = client.types()
        assert kinds.index("speech.stopped") < kinds.index("response.created") < kinds.index("response.done")
        assert kinds.count("response.done") == 2 and "error" not in kinds
    await server.until_empty()


async def test_it_answers_a_commit(server: Serving):
    samples, rate = recording("jfk.flac")
    async with server.client(sample_rate=rate, turn="manual", max_tokens=8) as client:
        await client.audio(samples[: 2 * rate].tobytes())
        await client.say(type="input.commit")
        assert (await client.until("response.done"))["reason"] in ("stop", "length")
        await client.say(type="input.commit")
        assert (await client.until("error"))["code"] == "input_empty"
    await server.until_empty()
