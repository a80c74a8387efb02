"""Spoken conversations: real recordings, real sockets, the default model in real vLLM. Nothing is faked."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from engine.models import DEFAULT_FAMILY, load_family
from engine.rehearsal import rehearse
from engine.vllm.engine import VllmEngine
from engine.vllm.environment import prepare_process
from engine.vllm.settings import VllmSettings
from tests.support.serving import Client, Serving, serving
from tests.support.speech import TRANSCRIPTS, recording, speak, spoken, word_error_rate
from tests.support.stage import pcm

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]
CACHE = Path(os.environ.get("METRONOME_CACHE_DIR", "~/.cache/metronome")).expanduser()
SESSION_TOKENS = 512  # short, so that one test can reach it


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Serving]:
    prepare_process("cpu")
    family = load_family(DEFAULT_FAMILY, CACHE)
    settings = VllmSettings(max_sessions=9, max_session_tokens=SESSION_TOKENS, kv_cache_bytes=1 << 28)
    async with serving(
        family,
        lambda: VllmEngine(family.engine_recipe(), settings),
        rehearse,
        aimd__initial=8,
        aimd__minimum=8,
    ) as running:
        yield running


async def ask(client: Client, text: str) -> str:
    """Speak a question in a server_vad session; the answer's text."""
    before = len(client.text())
    await speak(client, *spoken(text))
    await client.until("response.done")
    return client.text()[before:].lower()


async def test_recordings_are_heard(server: Serving):
    """All four at once, as four people would talk."""

    async def transcript(name: str) -> str:
        async with server.client(sample_rate=recording(name)[1]) as client:
            listener = asyncio.create_task(client.closed())
            await speak(client, *recording(name), silence_s=1.5)
            while client.types().count("speech.started") != client.types().count("input.transcript"):
                await asyncio.sleep(0.05)
            await client.socket.close()
            await listener
            return " ".join(e["text"] for e in client.events if e["type"] == "input.transcript")

    heard = await asyncio.gather(*(transcript(name) for name in TRANSCRIPTS))
    rate = word_error_rate(list(TRANSCRIPTS.values()), heard)
    assert rate <= 0.15, heard
    await server.until_empty()


async def test_answers_depend_on_the_question(server: Serving):
    async with server.client() as first, server.client() as second:
        italy, ocean = await asyncio.gather(
            ask(first, "What is the capital of Italy?"), ask(second, "Tell me about the ocean.")
        )
    assert "italy" in italy
    assert "ocean" in ocean
    assert italy != ocean


async def test_the_second_turn_knows_what_the_first_said_and_no_other_session_does(server: Serving):
    async with server.client() as maria, server.client() as david:
        await asyncio.gather(ask(maria, "My name is Maria."), ask(david, "My name is David."))
        hers, his = await asyncio.gather(ask(maria, "What is my name?"), ask(david, "What is my name?"))
        await maria.until("tick")  # the second answer's
        tokens = [e["kv_tokens"] for e in maria.events if e["type"] == "tick"]
    assert "maria" in hers and "david" not in hers
    assert "david" in his and "maria" not in his
    assert tokens == sorted(tokens) and tokens[-1] > tokens[0]  # one cache, and it went on


async def test_manual_turns_with_an_empty_one_between(server: Serving):
    async with server.client(turn="manual", sample_rate=recording("austen-0880.wav")[1]) as client:
        await client.say(type="input.commit")
        assert (await client.until("error"))["code"] == "input_empty"
        await speak(client, *recording("austen-0880.wav"), silence_s=0)
        await client.say(type="input.commit")
        done = await client.until("response.done")
        assert done["reason"] in ("stop", "length") and client.text()


async def test_an_answer_can_be_cancelled_and_the_conversation_goes_on(server: Serving):
    async with server.client(turn="manual", sample_rate=22050) as client:
        await client.say(type="session.update", instructions="Tell long stories.", max_tokens=200)
        await speak(client, *spoken("Tell me a long story about a dog and a cat."), silence_s=0)
        await client.say(type="input.commit")
        await client.until("response.text.delta")
        await client.say(type="response.cancel")
        assert (await client.until("response.done"))["reason"] == "cancelled"
        await speak(client, *spoken("What is the capital of Italy?"), silence_s=0)
        await client.say(type="input.commit")
        await client.until("response.done")
        assert "italy" in client.text().lower()


async def test_speech_over_an_answer_interrupts_it(server: Serving):
    async with server.client(sample_rate=22050) as client:
        await client.say(type="session.update", instructions="Tell long stories.", max_tokens=400)
        await speak(client, *spoken("Tell me a very long story about a dog and a cat."))
        await client.until("response.text.delta")
        await speak(client, *spoken("Please stop now and listen to me."))
        done = await client.until("response.done")
        assert done["reason"] in ("interrupted", "stop")
        if done["reason"] == "interrupted":
            await client.until("response.done")


@pytest.mark.parametrize("moment", ["speaking", "answering"])
async def test_a_vanished_client_leaves_nothing_behind(server: Serving, moment: str):
    async with server.client(turn="manual", sample_rate=22050) as client:
        await speak(client, *spoken("Tell me a story about a dog."), silence_s=0)
        if moment == "answering":
            await client.say(type="input.commit")
            await client.until("response.text.delta")
        client.socket.transport.abort()
    await server.until_empty()


async def test_the_third_is_refused_at_once_while_two_talk_on(
    server: Serving, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(server.service.gate, "_max_sessions", 2)
    async with server.client() as first, server.client() as second:
        talking = asyncio.gather(
            ask(first, "What is the capital of Italy?"), ask(second, "Tell me about the ocean.")
        )
        await asyncio.sleep(1.0)  # they are in the middle of their questions
        async with server.client() as third:
            code, reason = await third.closed()
        (error,) = third.events
        assert (error["code"], error["status"]) == ("at_capacity", 503) and error["retry_after_ms"] > 0
        assert code == 1013 and "2 places" in reason
        italy, ocean = await talking
    assert "italy" in italy and "ocean" in ocean
    await server.until_empty()


async def test_bad_input_harms_only_its_own_session(server: Serving):
    async def not_json(client: Client) -> None:
        await client.socket.send("hello")
        assert (await client.closed())[0] == 1007

    async def huge(client: Client) -> None:
        await client.audio(bytes((1 << 20) + 2))
        assert (await client.closed())[0] == 1009

    async def odd_and_empty(client: Client) -> None:
        for size in (0, 1, 3, 0, 639, 1):
            await client.audio(bytes(size))
        await client.say(type="ping")
        await client.until("pong")

    async def too_fast(client: Client) -> None:
        for _ in range(20):
            await client.audio(pcm(1.0))
        assert (await client.until("warning"))["code"] == "audio_dropped"

    async def long_instructions(client: Client) -> None:
        await client.say(type="session.update", instructions="Be kind to everyone. " * 150)
        assert (await client.until("error"))["code"] == "instructions_too_long"

    async def misfit(bad_input) -> None:
        async with server.client() as client:
            await client.until("session.created")
            await bad_input(client)

    async with server.client() as good:
        asking = asyncio.create_task(ask(good, "What is the capital of Italy?"))
        await asyncio.gather(
            *(misfit(bad_input) for bad_input in (not_json, huge, odd_and_empty, too_fast, long_instructions))
        )
        assert "italy" in await asking
    await server.until_empty()


async def test_silence_and_noise_say_nothing_and_cost_nothing(server: Serving):
    rng = np.random.default_rng(1)
    noise = (rng.standard_normal(3 * 16_000) * 300).astype(np.int16)
    async with server.client() as client:
        await client.until("session.created")
        await speak(client, noise, 16_000)
        await client.say(type="ping")
        await client.until("pong")
        assert "response.created" not in client.types()


async def test_an_over_long_session_is_warned_and_closed_and_the_others_go_on(server: Serving):
    samples, rate = spoken("Tell me about the ocean.")
    async with server.client() as other, server.client(turn="manual", sample_rate=rate) as long:

        async def talk_on() -> None:
            while True:
                await long.audio(samples.tobytes())
                await long.say(type="input.commit")
                before = long.types().count("response.done")
                while long.types().count("response.done") == before:
                    await asyncio.sleep(0.05)
                # New instructions follow the turn as a message of their own: 85 tokens each time.
                instructions = f"Story number {before}. " + "Tell a story. " * 20
                await long.say(type="session.update", instructions=instructions)

        talking = asyncio.create_task(talk_on())
        code, reason = await long.closed()
        talking.cancel()
        await asyncio.gather(talking, return_exceptions=True)
        assert code == 1000 and "length" in reason
        assert any(e["type"] == "warning" and e["code"] == "session_expiring" for e in long.events)
        assert "italy" in await ask(other, "What is the capital of Italy?")
    await server.until_empty()


async def test_a_tone_that_is_no_speech_committed_by_hand(server: Serving):
    async with server.client(turn="manual") as client:
        await client.audio(pcm(1.0))
        await client.say(type="input.commit")
        while (event := await client.next())["type"] not in ("error", "response.done"):
            pass
        assert event["type"] == "response.done" or event["code"] == "input_empty"
