"""Voices by name."""

from __future__ import annotations

from engine.voice.voice import Voice

DEFAULT_VOICE = "hibari"
NO_VOICE = "none"
VOICES = (DEFAULT_VOICE, NO_VOICE)


def load_voice(name: str) -> Voice | None:
    """The voice of this name; None for "none". Raises ValueError for a name that is not known."""
    if name == NO_VOICE:
        return None
    if name != DEFAULT_VOICE:
        raise ValueError(f"no voice is called {name!r}; known: {', '.join(VOICES)}")
    try:
        from engine.voice.hibari import HibariVoice  # here: it takes half a second and 150 MB
    except ImportError as error:
        raise ValueError(
            f"the voice needs hibari-tts ({error}): install it, or serve without a voice"
        ) from None
    return HibariVoice()
