"""The clock and the threads around the tick: brings audio to the family, works to the engine, results back.

Runs on the event loop; everything here is bookkeeping of microseconds. Four things run elsewhere, each on
one thread of its own: the engine, the family's `hear`, the voice activity detector, and the voice. A frame's
way:

    on_audio -> Session -> detector -> TickScheduler -> Family.hear -> Engine.submit -> Session -> deliver
                                                                  Session -> voice -> Session -> deliver
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from engine.audio.speech import SpeechDetector
from engine.engine import Engine, EngineError
from engine.errors import EngineFailure, Leaving, SessionError, SessionFault
from engine.events import Warning
from engine.faults import P, all_or_each, contained
from engine.models.family import Family
from engine.outputs import Cancel, Close, EndGeneration, Hush, Output, Speak, Submit, ToClient
from engine.scheduler import TickSample, TickScheduler
from engine.session import Session
from engine.tally import Tally
from engine.types import Hearing, Intake, Pcm, Result, Utterance, Work
from engine.voice.synthesizer import OnDuration, Synthesizer
from engine.voice.voice import Voice

log = logging.getLogger(__name__)

VAD_PERIOD_S = 0.032  # one window of the detector
HOUSEKEEPING_S = 1.0
REBUILD_LIMIT = 3  # engine failures within REBUILD_WINDOW_S before the process gives up
REBUILD_WINDOW_S = 600.0

Deliver = Callable[[ToClient], None]
"""Brings an event to the session's client. Never blocks; called on the event loop."""


class Phase(enum.StrEnum):
    """What the server is doing; `/health` reports it."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Conductor:
    """Owns the sessions. All methods but `start` belong to the event loop's thread."""

    def __init__(
        self,
        family: Family,
        make_engine: Callable[[], Engine],
        scheduler: TickScheduler,
        detector: SpeechDetector,
        on_sample: Callable[[TickSample, float], None],
        voice: Voice | None = None,
        on_clause: OnDuration = lambda voice_s, delay_s: None,
    ) -> None:
        """`on_sample` gets each slot's tick, `on_clause` what each spoken clause took."""
        self.loop = asyncio.get_running_loop()
        self.phase = Phase.STARTING
        self.family = family
        self.scheduler = scheduler
        self.num_stale_results = 0
        self.num_engine_failures = 0
        self._make_engine = make_engine
        self._engine: Engine | None = None
        self._detector = detector
        self._on_sample = on_sample
        self.synthesizer = Synthesizer(voice, self._on_spoken, on_clause) if voice is not None else None
        self._ended = Tally()  # of the sessions that are gone
        self._deliver: dict[str, Deliver] = {}
        self._uncounted: set[str] = set()
        self._outbox: list[Work] = []
        self._is_hearing = False
        self._failures: list[float] = []
        self._failed = asyncio.Event()
        self._rebuild: asyncio.Task[None] | None = None
        self._hearing_pool = ThreadPoolExecutor(1, "hearing")
        self._vad_pool = ThreadPoolExecutor(1, "vad")
        self._engine_pool = ThreadPoolExecutor(1, "engine-start")

    @property
    def engine(self) -> Engine | None:
        """The engine that runs, or None while there is none."""
        return self._engine

    # life

    async def start(self) -> None:
        """Load the engine and warm everything up; the phase stays `starting`. Raises EngineError."""
        await self.loop.run_in_executor(self._hearing_pool, self.family.warm_up)
        if self.synthesizer is not None:
            await self.synthesizer.warm_up()
        await self._start_engine()

    async def run(self) -> None:
        """Beat until cancelled, or until the engine failed for good."""
        tasks = [
            asyncio.create_task(loop())
            for loop in (self._beat, self._listen, self._keep_house, self._failed.wait)
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # a beat that ends is a bug of ours: let it be seen
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def drain(self, deadline_s: float) -> None:
        """Tell running sessions, let them end by themselves until the deadline, then close them."""
        self.phase = Phase.DRAINING
        end = self.loop.time() + deadline_s
        message = f"The server leaves in {deadline_s:g} s at the latest: finish, then reconnect."
        for session in self.scheduler:
            self._carry_out(session, [Warning(code="draining", message=message)])
        while len(self.scheduler) and self.loop.time() < end:  # noqa: ASYNC110 - many ends, one deadline
            await asyncio.sleep(0.05)
        self._close_all(Leaving("The server is leaving: reconnect, another one will answer."))

    async def close(self) -> None:
        if self._engine is not None:
            engine, self._engine = self._engine, None
            await self.loop.run_in_executor(self._engine_pool, engine.close)
        if self.synthesizer is not None:
            self.synthesizer.close()
        for pool in (self._hearing_pool, self._vad_pool, self._engine_pool):
            pool.shutdown(wait=True, cancel_futures=True)

    # sessions

    def open(self, session: Session, deliver: Deliver, *, is_counted: bool = True) -> None:
        """`is_counted`: whether what the session counts is part of `tally`; a rehearsal's is not."""
        if not is_counted:
            self._uncounted.add(session.id)
        self.scheduler.add(session)
        self._deliver[session.id] = deliver
        self.carry_out(session, contained(session, session.open))

    def carry_out(self, session: Session, outputs: Sequence[Output]) -> None:
        """Do what a session's method returned, and see whether the session has become due."""
        self._carry_out(session, outputs)
        self._after_events()

    def end(self, session: Session) -> None:
        """Free all that the session holds. Idempotent."""
        if self._deliver.pop(session.id, None) is None:
            return
        self.scheduler.remove(session.id)
        if session.id in self._uncounted:
            self._uncounted.remove(session.id)
        else:
            self._ended += session.tally
        self._outbox = [work for work in self._outbox if work.session_id != session.id]
        if self.synthesizer is not None:
            self.synthesizer.hush(session.id)
        if self._engine is not None:
            self._engine.end(session.id, session.generation)

    def tally(self) -> Tally:
        """What all sessions since the start have counted, those that run included."""
        running = (session for session in self.scheduler if session.id not in self._uncounted)
        return sum((session.tally for session in running), self._ended)

    # the beats: each waits in one function and works in another, so that none holds a session while it waits

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(max(0.0, self.scheduler.next_due() - time.monotonic()))
            self._tick(time.monotonic())

    def _tick(self, now: float) -> None:
        step = self.scheduler.step(now)
        for sample in step.samples:
            self._on_sample(sample, now)
        for session, outputs in step.outputs:
            self._carry_out(session, outputs)
        self._after_events()

    async def _listen(self) -> None:
        while True:
            await asyncio.sleep(VAD_PERIOD_S)
            await self._detect_speech()

    async def _detect_speech(self) -> None:
        waiting: list[tuple[Session, Pcm]] = []
        for session in self.scheduler:
            if outputs := contained(session, _take_unheard, session, waiting):
                self._carry_out(session, outputs)
        if not waiting:
            return
        items = [(session.gate.vad_state, audio) for session, audio in waiting]
        verdicts = await self.loop.run_in_executor(self._vad_pool, self._detect, items)
        now = time.monotonic()
        for (session, audio), probabilities in zip(waiting, verdicts, strict=True):
            if probabilities is None:
                self._fail(session)
            else:
                self._tell(session, session.on_speech, audio, probabilities.tolist(), now)
        self._after_events()

    def _detect(self, items: list[tuple[Any, Pcm]]) -> list[Any]:
        """Probabilities of each; None where the detector failed on it by itself."""

        def failed(some: list[tuple[Any, Pcm]]) -> str:
            return f"the detector failed on the audio of {len(some)} sessions"

        return all_or_each(self._detector.detect, items, failed)

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            self._watch_the_time(time.monotonic())

    def _watch_the_time(self, now: float) -> None:
        for session in self.scheduler:
            self._tell(session, session.on_time, now)
        self._after_events()

    # hearing

    def _after_events(self) -> None:
        """Start what has become possible: the next hearing, and the works that wait."""
        if not self._is_hearing and (batch := self.scheduler.take_batch(self._carry_out)):
            self._is_hearing = True
            future = self.loop.run_in_executor(self._hearing_pool, self._hear, batch)
            future.add_done_callback(lambda f: f.cancelled() or self._on_heard(batch, f.result()))
        self._submit_works()

    def _submit_works(self) -> None:
        if self._outbox and self._engine is not None:
            works, self._outbox = self._outbox, []
            self._engine.submit(works)

    def _hear(self, batch: list[Hearing]) -> list[Intake | None]:
        """None for a hearing that failed by itself."""

        def failed(some: list[Hearing]) -> str:
            return f"the audio of {', '.join(hearing.session_id for hearing in some)} could not be heard"

        return all_or_each(self.family.hear, batch, failed)

    def _on_heard(self, batch: list[Hearing], intakes: list[Intake | None]) -> None:
        self._is_hearing = False
        now = time.monotonic()
        for hearing, intake in zip(batch, intakes, strict=True):
            if (session := self.scheduler.get(hearing.session_id)) is None:
                continue
            if intake is None:
                self._fail(session)
            else:
                self._tell(session, session.on_heard, intake, hearing.is_final, now)
        self._after_events()

    # the voice

    def _on_spoken(self, utterance: Utterance, pcm: bytes | None) -> None:
        if (session := self.scheduler.get(utterance.session_id)) is not None:
            self._tell(session, session.on_spoken, utterance, pcm, time.monotonic())
            self._after_events()

    # the engine

    async def _start_engine(self) -> None:
        engine = self._make_engine()

        def on_results(results: Sequence[Result]) -> None:
            self.loop.call_soon_threadsafe(self._on_results, engine, results)

        def on_failure(error: EngineError) -> None:
            self.loop.call_soon_threadsafe(self._on_failure, engine, error)

        await self.loop.run_in_executor(self._engine_pool, engine.start, on_results, on_failure)
        self._engine = engine

    def _on_results(self, engine: Engine, results: Sequence[Result]) -> None:
        if engine is not self._engine:
            return
        now = time.monotonic()
        for result in results:
            session = self.scheduler.get(result.session_id)
            if session is None or session.generation != result.generation:
                self.num_stale_results += 1
                continue
            self._tell(session, session.on_result, result, now)
        self._after_events()

    def _on_failure(self, engine: Engine, error: EngineError) -> None:
        if engine is not self._engine:
            return
        log.error("engine failed: %s", error)
        self.num_engine_failures += 1
        self._engine = None
        self._outbox.clear()
        if self.phase is Phase.DRAINING:
            self._close_all(EngineFailure("The model's engine failed while the server was leaving."))
            return
        now = time.monotonic()
        self._failures = [t for t in self._failures if now - t < REBUILD_WINDOW_S] + [now]
        self.phase = Phase.STARTING
        message = "The model's engine failed and is being restarted: try again shortly."
        self._close_all(EngineFailure(message, retry_after_ms=5000))
        self._rebuild = asyncio.create_task(self._rebuild_engine(engine))

    async def _rebuild_engine(self, broken: Engine) -> None:
        try:
            await self.loop.run_in_executor(self._engine_pool, broken.close)
            if len(self._failures) > REBUILD_LIMIT:
                raise EngineError(f"{len(self._failures)} failures in {REBUILD_WINDOW_S:.0f} s")
            await self._start_engine()
            self.phase = Phase.READY
        except Exception:
            # The device no longer answers: the process exits, and its supervisor starts it anew.
            log.exception("the engine could not be rebuilt")
            self.phase = Phase.FAILED
            self._failed.set()

    # outputs

    def _tell(
        self, session: Session, method: Callable[P, Sequence[Output]], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        self._carry_out(session, contained(session, method, *args, **kwargs))

    def _fail(self, session: Session) -> None:
        """Its audio cannot be taken in."""
        session.tally.faults += 1
        self._carry_out(session, [Close(SessionFault())])

    def _carry_out(self, session: Session, outputs: Sequence[Output]) -> None:
        deliver = self._deliver.get(session.id)
        if deliver is None:
            return  # it ended meanwhile
        for output in outputs:
            match output:
                case Submit(work):
                    self._outbox.append(work)
                case Cancel(generation):
                    self._submit_works()  # its work may be among them, and must be there first
                    if self._engine is not None:
                        self._engine.cancel(session.id, generation)
                case EndGeneration(generation):
                    if self._engine is not None:
                        self._engine.end(session.id, generation)
                case Speak(utterance):
                    if self.synthesizer is not None:
                        self.synthesizer.say(utterance)
                case Hush():
                    if self.synthesizer is not None:
                        self.synthesizer.hush(session.id)
                case Close():
                    self.end(session)
                    deliver(output)
                    return
                case _:
                    deliver(output)
        self.scheduler.note(session)

    def _close_all(self, error: SessionError) -> None:
        for session in self.scheduler:
            self._carry_out(session, [Close(error)])


def _take_unheard(session: Session, waiting: list[tuple[Session, Pcm]]) -> Sequence[Output]:
    if (audio := session.gate.take()) is not None:
        waiting.append((session, audio))
    return ()
