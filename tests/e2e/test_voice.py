"""Spoken answers and interruptions with the default model in real vLLM, real sockets and the real voice.

The recogniser of the default family reads back what the server said.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest
import pytest_asyncio
import soxr

from engine.engine import OnFailure, OnResults
from engine.models import DEFAULT_FAMILY, bundles, load_family
from engine.models.prepare import prepare
from engine.models.smollm2_whisper import SmolLM2Whisper
from engine.models.whisper import Whisper
from engine.rehearsal import rehearse
from engine.types import SAMPLE_RATE, Finish, Result, Work
from engine.vllm.engine import VllmEngine
from engine.vllm.environment import prepare_process
from engine.vllm.settings import VllmSettings
from engine.voice import load_voice
from engine.voice.voice import VOICE_RATE
from tests.e2e.test_conversation import CACHE
from tests.support.serving import Client, Serving, serving
from tests.support.speech import recording, speak, spoken, word_error_rate, words

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]


class Recorded(VllmEngine):
    """The real engine; what it is given and gives back makes the context that it has of each session."""

    contexts: dict[str, list[int]] = {}  # noqa: RUF012 - one engine in this module
    works: list[Work] = []  # noqa: RUF012
    decoded: dict[str, list[int]] = {}  # noqa: RUF012
    generations: dict[str, int] = {}  # noqa: RUF012

    def start(self, on_results: OnResults, on_failure: OnFailure) -> None:
        def note(results: Sequence[Result]) -> None:
            for result in results:
                self.note(result)
            on_results(results)

        super().start(note, on_failure)

    def submit(self, batch: Sequence[Work]) -> None:
        for work in batch:
            self.works.append(work)
            is_new = self.generations.get(work.session_id) != work.generation
            context = [] if is_new else self.contexts[work.session_id]
            self.generations[work.session_id] = work.generation
            self.contexts[work.session_id] = [*context[: work.keep_tokens], *work.token_ids]
            self.decoded[work.session_id] = []
        super().submit(batch)

    def note(self, result: Result) -> None:
        decoded = self.decoded[result.session_id]
        decoded += result.token_ids
        if result.finish is not None:
            context = self.contexts[result.session_id]
            context += decoded if result.finish is Finish.STOP else decoded[:-1]
            assert result.finish is Finish.CANCELLED or len(context) == result.num_kv_tokens


@pytest.fixture(scope="module")
def family() -> SmolLM2Whisper:
    prepare_process("cpu")
    family = load_family(DEFAULT_FAMILY, CACHE)
    assert isinstance(family, SmolLM2Whisper)
    return family


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(family: SmolLM2Whisper) -> AsyncIterator[Serving]:
    settings = VllmSettings(max_sessions=5, kv_cache_bytes=1 << 28)
    async with serving(
        family,
        lambda: Recorded(family.engine_recipe(), settings),
        rehearse,
        voice=load_voice("hibari"),
    ) as running:
        yield running


def context(family: SmolLM2Whisper, client: Client) -> str:
    """All that the model knows of this session, as text; special tokens leave nothing."""
    token_ids = Recorded.contexts[client.events[0]["id"]]
    return b"".join(family._codec.bytes_of(token_id) for token_id in token_ids).decode()


def read_back(pcm: bytes) -> str:
    """The words in the server's sound."""
    sound = np.frombuffer(pcm, "<i2").astype(np.float32) / 32768
    whisper = Whisper(prepare(bundles.WHISPER, CACHE, None), threads=1)
    audio = soxr.resample(sound, VOICE_RATE, SAMPLE_RATE).astype(np.float32)
    return " ".join(word for heard in whisper.transcribe([audio]) for word in heard.words)


async def test_a_spoken_question_is_answered_in_text_and_sound(server: Serving):
    samples, rate = spoken("Tell me about rain.")
    async with server.client(sample_rate=rate, voice="on") as client:
        await speak(client, samples, rate)
        done = await client.until("response.audio.done")
        text = client.text()
        pieces = [e for e in client.events if e["type"] == "response.audio"]
        assert "".join(e["text"] for e in pieces) == text
        assert done["duration_ms"] == pytest.approx(1000 * len(client.sound) / 2 / VOICE_RATE, abs=1)
        first_text = client.types().index("response.text.delta")
        assert first_text < client.types().index("response.audio")
    heard = read_back(client.sound)
    assert word_error_rate([text], [heard]) <= 0.3, (text, heard)


async def test_a_session_without_voice_gets_no_sound(server: Serving):
    samples, rate = spoken("What is my name?")
    async with server.client(sample_rate=rate) as client:
        await speak(client, samples, rate)
        await client.until("response.done")
        assert not client.sound and client.events[0]["voice"] is False


async def hear(client: Client, seconds: float) -> tuple[str, int]:
    """Play the answer in real time as a page does, reporting, for so long; the id and what was played."""
    begin, played_ms = None, 0
    while played_ms < 1000 * seconds:
        if begin is None:
            event = await client.until("response.audio")
            begin = time.monotonic()
        await asyncio.sleep(0.25)
        sent_ms = sum(e["duration_ms"] for e in client.events if e["type"] == "response.audio")
        played_ms = min(sent_ms, round(1000 * (time.monotonic() - begin)))
        await client.say(type="response.played", response_id=event["response_id"], played_ms=played_ms)
        async with asyncio.timeout(5):
            await client.say(type="ping")
            await client.until("pong")
    return event["response_id"], played_ms


@pytest.mark.parametrize("way", ["speech", "cancel"])
async def test_only_the_words_that_were_heard_stay_in_the_models_context(
    server: Serving, family: SmolLM2Whisper, way: str
):
    story, rate = spoken("Tell me a very long story about a dog and a cat.")
    question, _ = spoken("What is the capital of Italy?")
    async with server.client(turn="server_vad", sample_rate=rate, voice="on") as client:
        await client.say(type="session.update", instructions="Tell long stories.", max_tokens=150)
        await speak(client, story, rate)
        response_id, played_ms = await hear(client, 1.5)
        if way == "cancel":
            await client.say(type="response.cancel")
            assert (await client.until("response.flush"))["response_id"] == response_id
            await client.say(type="response.played", response_id=response_id, played_ms=played_ms)
        told = client.text()
        await speak(client, question, rate)
        heard = await client.until("response.heard")
        await client.until("response.text.delta")
        await client.until("response.done")
        if "response.audio.done" not in client.types():
            await client.until("response.audio.done")
    types = client.types()
    assert types.index("response.flush") < types.index("response.heard")
    assert heard["response_id"] == response_id and heard["text"] and told.startswith(heard["text"])
    num_words = len(words(heard["text"]).split())
    assert 1 <= num_words <= 30 and num_words < len(words(told).split())  # people say 2 to 4 words a second
    known = context(family, client)
    after_story = known.partition("assistant\n")[2]
    assert after_story.startswith(heard["text"].strip() + "\nuser\n") or after_story.startswith(
        heard["text"] + "\nuser\n"
    ), known
    assert "Italy" in after_story  # the question follows right behind
    assert any(work.keep_tokens for work in Recorded.works if work.session_id == client.events[0]["id"])


async def test_short_noises_and_the_users_own_voice_on_an_answer(server: Serving):
    """A cough does not interrupt; a word does."""
    story, rate = spoken("Tell me a very long story about a dog and a cat.")
    rng = np.random.default_rng(5)
    cough = (rng.standard_normal(round(0.15 * rate)) * np.hanning(round(0.15 * rate)) * 9000).astype(np.int16)
    async with server.client(sample_rate=rate, voice="on") as client:
        await client.say(type="session.update", instructions="Tell long stories.", max_tokens=150)
        await speak(client, story, rate)
        await client.until("response.audio")
        await speak(client, cough, rate, silence_s=0.4)
        await client.say(type="ping")
        await client.until("pong")
        assert "response.flush" not in client.types()
        await speak(client, recording("austen-0880.wav")[0], 16_000, silence_s=0.0)
        await client.until("response.flush")
