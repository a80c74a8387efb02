"""The parts of a running server, put together once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from app.auth import read_keys
from app.door import Door
from app.gate import Gate
from app.metrics import Figures, Metrics
from app.settings import Settings
from engine.aimd import AimdLimit
from engine.audio.endpoint import EndpointerConfig
from engine.audio.speech import SpeechDetector
from engine.conductor import Conductor, Phase
from engine.config import SessionConfig
from engine.engine import Engine
from engine.models.family import Family
from engine.scheduler import MAX_BATCH, TickSample, TickScheduler
from engine.voice.voice import VOICE_RATE, Voice


@dataclass(slots=True)
class Service:
    """What sockets and HTTP handlers reach through `app.state.service`; one per process."""

    settings: Settings
    family: Family
    budget_s: float
    limit: AimdLimit
    gate: Gate
    door: Door
    conductor: Conductor
    metrics: Metrics
    session_defaults: SessionConfig
    started_at: float = field(default_factory=time.monotonic)
    num_misses: int = 0

    def session_config(self) -> SessionConfig:
        """What a session gets whose client asks for nothing. Needs a running engine."""
        engine = self.conductor.engine
        if engine is None:
            return self.session_defaults
        limits = engine.limits
        return replace(
            self.session_defaults,
            max_session_tokens=limits.max_session_tokens,
            max_head_tokens=limits.max_head_tokens,
            max_dropped_tokens=limits.max_dropped_tokens,
        )

    def on_sample(self, sample: TickSample, now: float) -> None:
        """One slot's tick: the admission limit learns from it."""
        if self.conductor.phase is Phase.STARTING:
            return  # the rehearsal, on caches that are still cold
        self.num_misses += sample.num_misses
        for lateness_s in sample.lateness_s:
            self.metrics.lateness.observe(lateness_s)
        self.limit.on_tick(now, sample.lateness_s, sample.num_misses, self.gate.in_flight)


def build(
    settings: Settings,
    family: Family,
    make_engine: Callable[[], Engine],
    detector: SpeechDetector,
    voice: Voice | None = None,
) -> Service:
    """Put the parts together; nothing runs yet. Call on the event loop."""
    info = family.info
    budget_s = info.budget_s if settings.tick.budget_ms is None else settings.tick.budget_ms / 1000
    limit = AimdLimit(settings.aimd_config(budget_s, info.target_fraction))
    conductor = Conductor(
        family,
        make_engine,
        TickScheduler(budget_s, settings.tick.slots, MAX_BATCH),
        detector,
        lambda sample, now: service.on_sample(sample, now),
        voice,
        lambda voice_s, delay_s: service.metrics.on_clause(voice_s, delay_s),
    )
    session_defaults = SessionConfig(
        mode=info.turn_modes[0],
        instructions="",  # the family's own
        max_tokens=settings.session.max_tokens,
        max_tokens_ceiling=settings.session.max_tokens_ceiling,
        voice_rate=None if voice is None else VOICE_RATE,
        budget_s=budget_s,
        backlog_limit_s=settings.session.backlog_budgets * budget_s,
        max_message_bytes=settings.session.max_message_bytes,
        idle_limit_s=settings.session.idle_limit_s,
        max_age_s=settings.session.max_age_s,
        speech=EndpointerConfig(
            threshold=settings.vad.threshold,
            release=0.7 * settings.vad.threshold,
            min_speech_ms=settings.vad.min_speech_ms,
            interrupt_ms=settings.vad.interrupt_ms,
            stop_silence_ms=settings.vad.silence_ms,
        ),
    )
    gate = Gate(limit, settings.max_sessions, conductor)
    keyring = read_keys(settings.auth.keys.get_secret_value(), settings.auth.key_file)
    service = Service(
        settings=settings,
        family=family,
        budget_s=budget_s,
        limit=limit,
        gate=gate,
        door=Door(keyring, settings.auth, gate.refused),
        conductor=conductor,
        metrics=Metrics(budget_s, limit.target_s),
        session_defaults=session_defaults,
    )
    service.metrics.registry.register(Figures(service))
    return service
