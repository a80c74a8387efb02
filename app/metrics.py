"""What Prometheus sees. Every label has a fixed set of values, and none names a session, a caller or a key.

Durations that are sampled as they happen are histograms; all else is read from the server's own counters at
the moment of a scrape (`Figures`), so that `/metrics` and `/capacity` cannot disagree.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.conductor import Conductor, Phase
from engine.types import SAMPLE_RATE
from engine.voice.voice import VOICE_RATE

if TYPE_CHECKING:
    from app.service import Service

PULSE_S = 0.25
REASONS = (
    "load", "slots", "kv_cache", "starting", "draining", "engine_failed",
    "unauthorized", "origin_not_allowed", "too_many_pending", "key_limit",
)  # fmt: skip
"""Why a session was refused. All are exported from the start: a rate needs a zero to rise from."""

_OF_BUDGET = (0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)
_LOOP_DELAYS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_CLAUSES_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12)
_STEPS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56)


class Metrics:
    """The histograms and the registry they live in, which is this server's own."""

    def __init__(self, budget_s: float, target_s: float) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.lateness = Histogram(
            "metronome_tick_lateness_seconds",
            "From when a session's work was due to its end; one sample a session with work and tick",
            buckets=sorted({round(part * budget_s, 6) for part in _OF_BUDGET} | {target_s}),
            registry=self.registry,
        )
        self.loop_delay = Histogram(
            "metronome_event_loop_delay_seconds",
            "How late the event loop woke a task that slept",
            buckets=_LOOP_DELAYS_S,
            registry=self.registry,
        )
        self.engine_step = Histogram(
            "metronome_engine_step_seconds",
            f"Duration of engine steps, the last one of each {PULSE_S} s",
            buckets=_STEPS_S,
            registry=self.registry,
        )

        self._voice = Histogram(
            "metronome_voice_seconds",
            "How long the voice took for a clause",
            buckets=_CLAUSES_S,
            registry=self.registry,
        )
        self._voice_delay = Histogram(
            "metronome_voice_delay_seconds",
            "From a clause's text to its sound, waiting for the voice included",
            buckets=_CLAUSES_S,
            registry=self.registry,
        )

    def on_clause(self, voice_s: float, delay_s: float) -> None:
        self._voice.observe(voice_s)
        self._voice_delay.observe(delay_s)

    async def pulse(self, conductor: Conductor) -> None:
        """Sample what nobody reports by itself, until cancelled."""
        loop = asyncio.get_running_loop()
        num_steps = 0
        while True:
            due = loop.time() + PULSE_S
            await asyncio.sleep(PULSE_S)
            self.loop_delay.observe(max(0.0, loop.time() - due))
            stats = conductor.engine.stats() if conductor.engine is not None else None
            if stats is not None and stats.num_steps != num_steps:
                num_steps = stats.num_steps
                self.engine_step.observe(stats.last_step_s)


class Figures(Collector):
    """Reads a service's own counters; call on the event loop, which owns them."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> list[Metric]:
        return []  # else registering would collect, before there is a service to read

    def collect(self) -> Iterator[Metric]:
        yield from self._server()
        yield from self._sessions()
        yield from self._audio()
        yield from self._voice()
        yield from self._engine()

    def _server(self) -> Iterator[Metric]:
        service = self._service
        info = GaugeMetricFamily(
            "metronome_info", "What runs", labels=["version", "model", "device"]
        )  # Prometheus joins it to others: value 1
        version = importlib.metadata.version("metronome")
        info.add_metric([version, service.family.info.name, service.settings.device], 1)
        yield info
        phase = GaugeMetricFamily("metronome_phase", "1 for the phase the server is in", labels=["phase"])
        for each in Phase:
            phase.add_metric([each.value], float(each is service.conductor.phase))
        yield phase
        yield _gauge("budget_seconds", "Frame budget B", service.budget_s)
        yield _gauge("lateness_target_seconds", "The median lateness to stay under", service.limit.target_s)

    def _sessions(self) -> Iterator[Metric]:
        gate, limit = self._service.gate, self._service.limit
        yield _gauge("sessions_active", "Sessions that run", gate.in_flight)
        yield _gauge("sessions_cap", "Sessions that may run at once now", gate.cap)
        yield _gauge("sessions_free", "Sessions that would be admitted now", gate.free)
        yield _gauge(
            "sockets_pending", "Sockets that still owe their API key", self._service.door.num_pending
        )
        yield _counter("sessions_admitted", "Sessions admitted", gate.num_admitted)
        refused = CounterMetricFamily("metronome_sessions_refused", "Sessions refused", labels=["reason"])
        for reason in REASONS:
            refused.add_metric([reason], gate.refused[reason])
        yield refused
        yield _counter("limit_cuts", "Times the admission limit was lowered", limit.num_cuts)
        yield _counter("limit_growths", "Times the admission limit was raised", limit.num_growths)
        yield _counter("tick_misses", "Ticks still running when due again", self._service.num_misses)

    def _audio(self) -> Iterator[Metric]:
        conductor = self._service.conductor
        tally = conductor.tally()
        backlogs = [session.backlog_samples / SAMPLE_RATE for session in conductor.scheduler]
        yield _counter("input_audio_seconds", "Audio taken in", tally.audio_samples / SAMPLE_RATE)
        yield _counter("input_dropped_seconds", "Audio dropped unheard", tally.dropped_samples / SAMPLE_RATE)
        yield _counter(
            "input_rate_mismatches",
            "Times audio contradicted the declared sample rate",
            tally.rate_mismatches,
        )
        yield _gauge("input_backlog_seconds", "Audio that waits, of all sessions", sum(backlogs))
        yield _gauge(
            "input_backlog_max_seconds", "Audio that waits in the worst session", max(backlogs, default=0.0)
        )
        yield _counter("tokens", "Tokens decoded", tally.tokens)
        yield _counter("session_faults", "Sessions ended by a fault of the server's own code", tally.faults)

    def _voice(self) -> Iterator[Metric]:
        synthesizer, tally = self._service.conductor.synthesizer, self._service.conductor.tally()
        waiting, failures = (synthesizer.num_waiting, synthesizer.num_failures) if synthesizer else (0, 0)
        yield _gauge("voice_queue", "Clauses that wait for the voice", waiting)
        yield _counter("voice_failures", "Clauses that the voice could not speak", failures)
        yield _counter("voice_audio_seconds", "Sound sent to clients", tally.sound_samples / VOICE_RATE)
        yield _counter(
            "interruptions", "Answers stopped while they were written or played", tally.interruptions
        )

    def _engine(self) -> Iterator[Metric]:
        conductor = self._service.conductor
        yield _counter("engine_failures", "Times the engine died", conductor.num_engine_failures)
        yield _counter("stale_results", "Results nobody waited for any more", conductor.num_stale_results)
        if (engine := conductor.engine) is None:
            return
        stats, limits = engine.stats(), engine.limits
        yield _gauge("engine_sessions", "Sessions the engine holds", stats.num_sessions)
        yield _counter("engine_steps", "Engine steps, of the engine that runs", stats.num_steps)
        yield _gauge("kv_blocks_used", "KV cache blocks in use", stats.kv_blocks_used)
        yield _gauge("kv_blocks", "KV cache blocks in all", limits.num_kv_blocks)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"metronome_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"metronome_{name}", text, value=value)
