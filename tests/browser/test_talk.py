"""Talking with the default model through the page: microphone, words, loudspeaker; only the air is faked."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import soundfile
import soxr
from playwright.async_api import expect

from engine.models import DEFAULT_FAMILY, bundles, load_family
from engine.models.prepare import prepare
from engine.models.whisper import Whisper
from engine.rehearsal import rehearse
from engine.types import SAMPLE_RATE
from engine.vllm.engine import VllmEngine
from engine.vllm.environment import prepare_process
from engine.vllm.settings import VllmSettings
from engine.voice import load_voice
from tests.e2e.test_conversation import CACHE
from tests.support.browsing import Visit, add_tap, begin, chromium, visit
from tests.support.serving import Serving, serving
from tests.support.speech import spoken, word_error_rate

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]
STORY = json.dumps({"instructions": "Tell long stories."})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Serving]:
    prepare_process("cpu")
    family = load_family(DEFAULT_FAMILY, CACHE)
    settings = VllmSettings(max_sessions=3, kv_cache_bytes=1 << 28)
    voice = load_voice("hibari")
    async with serving(
        family, lambda: VllmEngine(family.engine_recipe(), settings), rehearse, voice=voice
    ) as running:
        add_tap(running)
        yield running


def read_back(sound: np.ndarray, rate: int) -> str:
    """The words in what the loudspeaker played, as the recogniser hears them."""
    whisper = Whisper(prepare(bundles.WHISPER, CACHE, None), threads=1)
    audio = soxr.resample(sound, rate, SAMPLE_RATE).astype(np.float32)
    return " ".join(word for heard in whisper.transcribe([audio]) for word in heard.words)


async def until_said(page: Visit, num_words: int) -> None:
    """So many words of the newest answer were spoken."""

    async def condition() -> bool:
        heard = page.entries("server").last.locator(".heard")
        return await heard.count() > 0 and len((await heard.inner_text()).split()) >= num_words

    await page.until(condition, f"{num_words} words were spoken")


async def test_a_spoken_question_is_answered_in_text_and_sound(server: Serving, tmp_path: Path):
    samples, rate = spoken("Tell me about the ocean.")
    silence = np.zeros(2 * rate, np.int16)  # the page is still connecting
    soundfile.write(tmp_path / "question.wav", np.concatenate([silence, samples, silence]), rate)
    async with (
        chromium(microphone=tmp_path / "question.wav") as browser,
        visit(browser, server.port, recorded=True) as page,
    ):
        await begin(page)
        await expect(page.entries("you")).to_contain_text("ocean")
        await page.until_floor("answering")
        await page.until_floor("listening")
        await expect(page["late-last"]).to_have_text(re.compile(r"^[\d,.]+ m?s$"))
        text = await page.entries("server").locator(".heard").inner_text()
        heard = read_back(*await page.heard())
    assert "ocean" in text.lower()
    assert word_error_rate([text], [heard]) <= 0.35, (text, heard)
    await server.until_empty()


async def test_speech_interrupts_the_answer_and_is_answered_itself(server: Serving):
    story, question = spoken("Tell me a long story about a dog."), spoken("What is the capital of Italy?")
    async with (
        chromium() as browser,
        visit(browser, server.port, own_microphone=True, recorded=True, settings=STORY) as page,
    ):
        await begin(page)
        await page.say(*story)
        await until_said(page, 5)
        asking = asyncio.create_task(page.say(*question))
        first = page.entries("server").first
        await expect(first).to_have_attribute("data-state", "cut")
        await expect(first.locator(".mark")).to_have_text("interrupted here")
        await expect(first.locator(".unheard")).not_to_have_text("")
        await asking
        await expect(page.entries("you")).to_have_count(2)
        await until_said(page, 3)
        await expect(page.entries("server").last).to_contain_text("Italy")
    await server.until_empty()
