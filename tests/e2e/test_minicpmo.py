"""MiniCPM-o behind real sockets, in its own full duplex and with the server's turns. The weights are random:
what it says means nothing, how it hears and is heard is real.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from engine.rehearsal import rehearse
from engine.vllm.engine import VllmEngine
from engine.vllm.environment import prepare_process, repair_torch_companions
from engine.vllm.settings import VllmSettings
from tests.support.serving import Serving, serving
from tests.support.speech import recording, speak

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["4.5", "2.6"])
async def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Serving]:
    prepare_process("cpu")
    repair_torch_companions()
    from engine.models import published
    from tests.support.tiny_minicpmo import write_checkpoint

    model_dir: Path = write_checkpoint(tmp_path_factory.mktemp("models") / request.param, request.param)
    family = published.load(str(model_dir))
    settings = VllmSettings(max_sessions=5, kv_cache_bytes=1 << 27)
    async with serving(family, lambda: VllmEngine(family.engine_recipe(), settings), rehearse) as running:
        yield running


def ticks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] == "tick" and event["audio_ms"]]


async def test_it_listens_and_decides_in_every_second(server: Serving):
    async def talk(name: str) -> list[dict[str, Any]]:
        samples, rate = recording(name)
        async with server.client(sample_rate=rate, turn="continuous") as client:
            listener = asyncio.create_task(client.closed())
            await speak(client, samples[: 6 * rate], rate, silence_s=0.5)
            await client.socket.close()
            await listener
            return client.events

    for session in await asyncio.gather(talk("jfk.flac"), talk("austen-0870.wav")):
        assert session[0]["turn"] == "continuous" and session[0]["budget_ms"] == 1000
        heard = ticks(session)
        assert len(heard) >= 2  # fewer than seconds on a busy machine: what waits joins the next tick
        kv_tokens = [tick["kv_tokens"] for tick in heard]
        assert kv_tokens == sorted(kv_tokens) and kv_tokens[-1] - kv_tokens[0] >= 11 * (len(heard) - 1)
        assert all(event["type"] != "error" for event in session)
    await server.until_empty()


async def test_it_answers_when_the_user_has_spoken(server: Serving):
    samples, rate = recording("austen-0880.wav")
    async with server.client(sample_rate=rate, turn="server_vad", max_tokens=24) as client:
        await speak(client, samples, rate, silence_s=1.5)
        await client.until("response.done")
        kinds = client.types()
        assert kinds.index("speech.stopped") < kinds.index("response.created") < kinds.index("response.done")
        assert client.text() and not re.search(r"<\|\w+\|>", client.text())  # no control token
        assert client.events[-1]["reason"] in ("stop", "length")
    await server.until_empty()


async def test_it_answers_a_commit(server: Serving):
    samples, rate = recording("jfk.flac")
    async with server.client(sample_rate=rate, turn="manual", max_tokens=8) as client:
        for _ in range(2):
            await client.audio(samples[: 2 * rate].tobytes())
            await client.say(type="input.commit")
            done = await client.until("response.done")
            assert done["tokens"] <= 8
    await server.until_empty()
