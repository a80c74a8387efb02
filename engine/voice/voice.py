"""The interface of a voice: text to sound, and nothing of when or for whom."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

VOICE_RATE = 24_000
"""Samples a second of all spoken sound, on the wire too."""

Sound16 = npt.NDArray[np.int16]
"""Samples of mono sound at `VOICE_RATE`, shape [num_samples]."""


class Voice(ABC):
    """One voice. `speak` is heavy and runs on a thread of its own, never twice at once."""

    name: str

    @abstractmethod
    def speak(self, text: str) -> Sound16:
        """The sound of one clause of an answer; empty where nothing in it can be said.

        The text is the model's: any characters at all. What it raises ends the sound of that answer only.
        """

    def warm_up(self) -> None:  # noqa: B027 - a hook, not a duty
        """Load what is loaded lazily, so that no caller pays for it. Called once before serving."""
