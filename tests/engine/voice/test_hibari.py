"""The voice that ships: it says anything, offline, and what it says can be understood (tests/e2e)."""

from __future__ import annotations

import socket
import urllib.request

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.voice import load_voice
from engine.voice.hibari import HibariVoice
from engine.voice.voice import VOICE_RATE


@pytest.fixture(scope="module")
def voice() -> HibariVoice:
    with pytest.MonkeyPatch.context() as patch:

        def refuse(*args, **kwargs):
            raise AssertionError("the voice used the network")

        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(urllib.request, "urlopen", refuse)
        voice = load_voice("hibari")
        assert isinstance(voice, HibariVoice)
        voice.warm_up()
        return voice


def test_speech_is_as_long_as_speech_is_and_begins_at_once(voice: HibariVoice):
    sound = voice.speak("Rain is water that falls from clouds.")
    assert sound.dtype == np.int16 and 1.5 < len(sound) / VOICE_RATE < 4.0
    loud = np.nonzero(np.abs(sound) > 1000)[0]
    assert loud[0] / VOICE_RATE < 0.15 and 0.1 < (len(sound) - loud[-1]) / VOICE_RATE < 0.6
    assert np.array_equal(sound, voice.speak("Rain is water that falls from clouds."))


@pytest.mark.parametrize("text", ["", " ", "...", "\n", "\N{GRINNING FACE}", "**", "```", "(-:", "\x00"])
def test_what_cannot_be_said_is_silent(voice: HibariVoice, text: str):
    assert len(voice.speak(text)) == 0


def test_markup_is_not_read_out(voice: HibariVoice):
    plain = voice.speak("Rome is the capital.")
    assert np.array_equal(voice.speak("**Rome** is `the` capital."), plain)
    assert len(voice.speak("[Rome](/hot/) is it.")) > 0  # no way to make it say other phonemes


@pytest.mark.parametrize(
    "text",
    [
        "7" * 36,
        "7" * 45,
        "9" * 200,
        "It is $" + "9" * 50 + ".",
        ",".join(["123"] * 15),
        "3." + "1415926535" * 15,
        "\N{FULLWIDTH DIGIT SEVEN}" * 60,
    ],
)
def test_numbers_of_any_length_are_spoken(voice: HibariVoice, text: str):
    assert len(voice.speak(text)) > 5 * VOICE_RATE


@pytest.mark.parametrize("text", ["你好世界。" * 16, "Привет, как дела?", "Tokyo is 東京都の中心です"])
def test_what_it_would_leave_out_is_refused_not_passed_over(voice: HibariVoice, text: str):
    with pytest.raises(ValueError, match="speaks English"):
        voice.speak(text)


def test_a_few_letters_of_another_script_are_no_reason_to_be_silent(voice: HibariVoice):
    assert len(voice.speak("The Greek letter π is for the circle, café is a café.")) > 2 * VOICE_RATE


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60) | st.text(st.characters(categories=["N", "L", "P", "Z"]), max_size=30))
@example("10 m\N{SUPERSCRIPT TWO} and \N{ETHIOPIC DIGIT ONE}")
def test_any_text_is_spoken_or_silent_or_refused(voice: HibariVoice, text: str):
    try:
        sound = voice.speak(text)
    except ValueError as error:
        assert "speaks English" in str(error)
    else:
        assert len(sound) < 60 * VOICE_RATE


def test_none_is_no_voice_and_others_are_refused():
    assert load_voice("none") is None
    with pytest.raises(ValueError, match="known: hibari, none"):
        load_voice("robot")
