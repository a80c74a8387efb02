"""Spoken answers on real sockets, with the null engine and a tone for a voice."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from websockets.exceptions import ConnectionClosed

from engine.null import NullEngine
from engine.voice.voice import VOICE_RATE, Sound16
from tests.support.serving import TIMEOUT_S, Client, serving
from tests.support.stage import pcm
from tests.support.voices import CHAR_SAMPLES, ToneVoice

ANSWER = "echo: heard 1000 ms"


async def ask(client: Client) -> None:
    await client.audio(pcm(1.0))
    await client.say(type="input.commit")


async def test_a_session_that_wants_it_hears_the_answer():
    async with serving(voice=ToneVoice()) as server:
        async with server.client(turn="manual", voice="on") as client:
            created = await client.next()
            assert (created["voice"], created["voice_sample_rate"]) == (True, VOICE_RATE)
            await ask(client)
            await client.until("response.audio.done")
            assert client.text() == ANSWER
            assert len(client.sound) == 2 * CHAR_SAMPLES * len(ANSWER)
            text = (await server.get("/metrics")).text
        assert "metronome_voice_seconds_count 2.0" in text  # "echo:" and the rest
        assert "metronome_voice_queue 0.0" in text
        assert f"metronome_voice_audio_seconds_total {len(ANSWER) * 0.06:g}" in text
        await server.until_empty()


@pytest.mark.parametrize(
    ("query", "wanted"), [({}, False), ({"voice": "off"}, False), ({"voice": "on"}, True)]
)
async def test_the_voice_is_the_sessions_choice(query: dict, wanted: bool):
    async with serving(voice=ToneVoice()) as server, server.client(**query) as client:
        assert (await client.next())["voice"] is wanted
        await client.say(type="session.update", voice=not wanted)
        assert (await client.until("session.updated"))["voice"] is not wanted


async def test_a_server_without_a_voice_says_so():
    async with serving() as server, server.client(turn="manual", voice="on") as client:
        created = await client.next()
        assert (created["voice"], created["voice_sample_rate"]) == (False, None)
        await client.say(type="session.update", voice=True)
        assert (await client.until("error"))["code"] == "no_voice"
        await ask(client)
        await client.until("response.done")
        assert not client.sound


async def test_an_interruption_flushes_and_the_kept_words_are_told():
    async with serving(voice=ToneVoice()) as server, server.client(turn="manual", voice="on") as client:
        await ask(client)
        response_id = (await client.until("response.audio.done"))["response_id"]
        await client.say(type="response.played", response_id=response_id, played_ms=100)
        await client.say(type="response.cancel")
        assert (await client.until("response.flush"))["response_id"] == response_id
        await client.say(type="response.played", response_id=response_id, played_ms=800)
        await ask(client)
        heard = await client.until("response.heard")
        assert (heard["text"], heard["played_ms"]) == ("echo: heard", 800)
        text = (await server.get("/metrics")).text
        assert "metronome_interruptions_total 1.0" in text


@pytest.mark.parametrize("played_ms", [-1, 1.5, "x", None, 10**9])
async def test_a_report_that_is_no_number_of_milliseconds_is_not_understood(played_ms):
    async with serving(voice=ToneVoice()) as server, server.client(voice="on") as client:
        await client.say(type="response.played", response_id="r", played_ms=played_ms)
        assert (await client.until("error"))["code"] == "not_understood"


class Long(ToneVoice):
    """A minute of sound for each clause: more than any client is owed at once."""

    def speak(self, text: str) -> Sound16:
        return super().speak(text * 200)


async def test_a_client_that_does_not_read_its_sound_costs_its_own_session_only(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("app.stream.SEND_LIMIT_S", 1.0)
    async with (
        serving(voice=Long()) as server,
        server.client(turn="manual") as other,
        server.client(turn="manual", voice="on") as deaf,
    ):
        await deaf.next()
        deaf.socket.transport.pause_reading()
        with contextlib.suppress(ConnectionClosed):
            async with asyncio.timeout(TIMEOUT_S):
                while server.service.gate.in_flight == 2:
                    await deaf.socket.send(pcm(0.5))
                    await deaf.socket.send(json.dumps({"type": "input.commit"}))
                    await asyncio.sleep(0.05)
        assert server.service.gate.in_flight == 1
        await ask(other)
        await other.until("response.done")
        assert other.text() == ANSWER
        deaf.socket.transport.abort()


class Broken(ToneVoice):
    def speak(self, text: str) -> Sound16:
        raise OSError("no such phoneme")


async def test_a_voice_that_fails_costs_the_sound_and_nothing_else(caplog: pytest.LogCaptureFixture):
    async with serving(voice=Broken()) as server, server.client(turn="manual", voice="on") as client:
        await ask(client)
        warning = await client.until("warning")
        assert warning["code"] == "voice_failed"
        while client.text() != ANSWER:
            await client.next()
        assert "metronome_voice_failures_total 1.0" in (await server.get("/metrics")).text
        await ask(client)
        await client.until("input.transcript")
    assert "OSError" in caplog.text
    assert "echo" not in caplog.text and "phoneme" not in caplog.text  # the log never holds words


async def test_an_engine_that_decodes_on_stops_within_a_step_of_the_cancel():
    slow = lambda: NullEngine(step_s=0.05, tokens_per_step=1)  # noqa: E731
    async with (
        serving(make_engine=slow, voice=ToneVoice()) as server,
        server.client(turn="manual", voice="on") as client,
    ):
        await ask(client)
        await client.until("response.audio")
        await client.say(type="response.cancel")
        await client.until("response.flush")
        done = await client.until("response.done")
        assert done["reason"] == "cancelled" and done["tokens"] < len(ANSWER)
        assert "response.audio.done" not in client.types()
