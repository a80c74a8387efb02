"""Sessions on a stage: the scheduler, the null family and the null engine's core, with a clock of our own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from engine.config import SessionConfig
from engine.engine import EngineLimits
from engine.events import ResponseTextDelta, ServerEvent
from engine.models.null import CLOSE, END, HEAD, OPEN, NullFamily
from engine.null import NullCore
from engine.outputs import Cancel, Close, EndGeneration, Hush, Output, Sound, Speak, Submit
from engine.scheduler import TickSample, TickScheduler
from engine.session import Session
from engine.types import SAMPLE_RATE, Finish, Hearing, Result, TurnMode, Utterance, Work
from engine.voice.voice import Voice
from tests.support.voices import ToneVoice

LIMITS = EngineLimits(
    max_sessions=8,
    max_session_tokens=2048,
    num_kv_blocks=8 * 128,
    block_size_tokens=16,
    blocks_per_session=128,
    max_batch_tokens=2048,
)
CONFIG = SessionConfig(mode=TurnMode.MANUAL, instructions="be brief", max_tokens=64, max_session_tokens=2048)


def readable(tokens: Sequence[int]) -> str:
    """A null conversation as text: {instructions| (what the user said) answer|."""
    signs = {HEAD: "{", OPEN: "(", CLOSE: ")", END: "|"}
    return "".join(signs.get(token, chr(token)) for token in tokens)


def pcm(seconds: float, rate: int = SAMPLE_RATE) -> bytes:
    """A tone, as a client sends it."""
    wave = 8000 * np.sin(np.arange(round(seconds * rate)) * 0.3)
    return wave.astype("<i2").tobytes()


class Stage:
    """Plays the conductor without a loop: `advance` runs slots, hearings and engine steps in turn."""

    def __init__(
        self, family: NullFamily | None = None, tokens_per_step: int = 4, num_slots: int = 4
    ) -> None:
        self.family = family or NullFamily()
        self.core = NullCore(LIMITS, tokens_per_step)
        self.scheduler = TickScheduler(self.family.info.budget_s, num_slots, max_batch=8)
        self.now = 1000.0
        self.samples: list[TickSample] = []
        self.said: dict[str, list[ServerEvent | Sound | Close]] = {}
        self.works: list[Work] = []  # all that the engine was given
        self.caches: dict[str, list[int]] = {}  # the tokens that the engine holds of each session
        self._begun: set[tuple[str, int]] = set()  # generations that have a cache
        self._decoded: dict[str, list[int]] = {}  # by the work that runs
        self.voice: Voice = ToneVoice()
        self.utterances: list[tuple[Session, Utterance]] = []  # with the voice
        self.can_speak = True  # False: the voice is stuck
        self.can_hear = True  # False: hearings stay in flight
        self.can_step = True  # False: the engine is stuck
        self.hearings: list[Hearing] = []

    def open(self, name: str = "a", **changes: Any) -> Session:
        session = Session(name, self.family, replace(CONFIG, **changes), self.now)
        self.said[name] = []
        self.scheduler.add(session)
        self.do(session, session.open())
        return session

    def do(self, session: Session, outputs: Sequence[Output]) -> None:
        for output in outputs:
            match output:
                case Submit(work):
                    self._take_in(work)
                    self.core.submit(work)
                case Speak(utterance):
                    self.utterances.append((session, utterance))
                case Hush():
                    self.utterances = [item for item in self.utterances if item[0] is not session]
                case Cancel(generation):
                    self.core.cancel(session.id, generation)
                case EndGeneration(generation):
                    self.core.end(session.id, generation)
                case _:
                    self.said[session.id].append(output)
                    if isinstance(output, Close):
                        self.scheduler.remove(session.id)
                        self.core.end(session.id, session.generation)
        self.scheduler.note(session)

    def step(self) -> None:
        """One round at this instant: hear what is due, one engine step."""
        self.hearings += self.scheduler.take_batch(self.do)
        if self.can_hear:
            hearings, self.hearings = self.hearings, []
            for hearing, intake in zip(hearings, self.family.hear(hearings), strict=True):
                if (session := self.scheduler.get(hearing.session_id)) is not None:
                    self.do(session, session.on_heard(intake, hearing.is_final, self.now))
        if self.can_step and self.core.has_work:
            for result in self.core.step():
                self._note(result)
                if (session := self.scheduler.get(result.session_id)) is not None:
                    self.do(session, session.on_result(result, self.now))
        while self.can_speak and self.utterances:
            session, utterance = self.utterances.pop(0)
            pcm = self.voice.speak(utterance.text).astype("<i2").tobytes()
            self.do(session, session.on_spoken(utterance, pcm, self.now))

    def _take_in(self, work: Work) -> None:
        generation = (work.session_id, work.generation)
        cache = self.caches[work.session_id] if generation in self._begun else []
        self._begun.add(generation)
        self.works.append(work)
        self.caches[work.session_id] = [*cache[: work.keep_tokens], *work.token_ids]
        self._decoded[work.session_id] = []

    def _note(self, result: Result) -> None:
        """The session's and the engine's idea of what is in the cache must be the same at any time."""
        decoded = self._decoded.setdefault(result.session_id, [])
        decoded += result.token_ids
        if (
            result.finish in (None, Finish.REFUSED)
            or (session := self.scheduler.get(result.session_id)) is None
        ):
            return
        cache = self.caches[result.session_id]
        cache += decoded if result.finish is Finish.STOP else decoded[:-1]
        if result.generation == session.generation and result.finish is not Finish.CANCELLED:
            assert len(cache) == result.num_kv_tokens, readable(cache)

    def advance(self, seconds: float, step_s: float = 0.05) -> None:
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now += step_s
            step = self.scheduler.step(self.now)
            self.samples += step.samples
            for session, outputs in step.outputs:
                self.do(session, outputs)
            self.step()
            for session in self.scheduler:
                self.do(session, session.on_time(self.now))

    def events(self, name: str, kind: type) -> list[Any]:
        return [event for event in self.said[name] if isinstance(event, kind)]

    def text(self, name: str = "a") -> str:
        """All text of all answers."""
        return "".join(event.delta for event in self.events(name, ResponseTextDelta))
