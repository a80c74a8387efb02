"""Where a chunk's time goes: the parts of a running engine, timed on the device and on the host.

A probe wraps methods of one engine's objects; nothing of vLLM is imported. On CUDA the parts on the device
are spans between two events on its stream, so they hold the gaps in which the device waits for the host.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.families_late import SLOW_S, Late
from engine.models.family import Family
from engine.types import Hearing, Intake, Result
from engine.vllm.engine import VllmEngine


class Clock:
    """Marks in time whose distances are read later, when the device has passed them."""

    def __init__(self, on_device: bool) -> None:
        self._on_device = on_device

    def mark(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def settle(self) -> None:
        """Wait until the device has passed all marks made so far."""
        if self._on_device:
            import torch

            torch.cuda.synchronize()

    def ms(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) if self._on_device else 1e3 * (end - start)


@dataclass
class Step:
    """One step of the engine."""

    num_chunks: int  # sessions that take tokens in
    num_prefill: int  # tokens they take in
    num_decodes: int
    num_items: int  # blocks of audio encoded
    span: tuple[Any, Any]
    host_ms: float  # building the batch, launching
    phase: str

    def composition(self) -> dict[str, int]:
        return {
            "chunks": self.num_chunks,
            "prefill_tokens": self.num_prefill,
            "decodes": self.num_decodes,
            "items": self.num_items,
        }


@dataclass
class Probe:
    """Figures of the time between `begin` and `report`. Several threads write, each a list of its own."""

    clock: Clock
    late: Late = field(default_factory=Late)
    early_steps: list[Step] = field(default_factory=list)  # before `begin`
    steps: list[Step] = field(default_factory=list)
    encoder: list[tuple[Any, Any]] = field(default_factory=list)
    features: list[tuple[int, float]] = field(default_factory=list)  # parts of audio, ms
    submits: list[float] = field(default_factory=list)  # ms a work, `SessionCore.submit` with its request
    sampling: list[tuple[Any, Any]] = field(default_factory=list)
    is_on: bool = False
    _step_details: list[dict[str, Any]] = field(default_factory=list)

    def begin(self) -> None:
        self.early_steps, self.steps = self.steps, []
        self.is_on = True

    def listen(self, family: Family) -> None:
        """Time the family's hearing."""
        hear = family.hear

        def timed(batch: Sequence[Hearing]) -> list[Intake]:
            started = time.perf_counter()
            with self.late.busy("hear") as details:
                details.append({"sessions": len(batch)})
                intakes = hear(batch)
            if self.is_on:
                num = sum(len(intake.features) for intake in intakes)
                self.features.append((num, 1e3 * (time.perf_counter() - started)))
            return intakes

        family.hear = timed  # type: ignore[method-assign]

    def attach(self, core: Any) -> None:
        """`core` is the SessionCore; called on the engine's thread before its first step."""
        submit, step = core.submit, core.step

        def timed(work: Any) -> None:
            started = time.perf_counter()
            with self.late.busy("submit"):
                submit(work)
            if self.is_on and work.features:
                self.submits.append(1e3 * (time.perf_counter() - started))

        def watched() -> None:
            with self.late.busy("step") as self._step_details:
                step()

        core.submit, core.step = timed, watched
        worker = core._core.model_executor.driver_worker.worker
        runner = worker.model_runner
        runner.execute_model = self._timed_execute(runner.execute_model)
        runner.sample_tokens = self._timed_sampling(runner.sample_tokens)
        tower = encoder_of(worker.get_model())
        begun: list[Any] = []
        tower.register_forward_pre_hook(lambda *_: begun.append(self.clock.mark()))

        def ended(*_: Any) -> None:
            start = begun.pop()
            if self.is_on:
                self.encoder.append((start, self.clock.mark()))

        tower.register_forward_hook(ended)

    def _timed_execute(self, execute: Callable) -> Callable:
        def timed(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            begun, start = time.perf_counter(), self.clock.mark()
            counts = scheduled.num_scheduled_tokens.values()
            chunks = [count for count in counts if count > 1]
            num_items = sum(map(len, scheduled.scheduled_encoder_inputs.values()))
            self._step_details.append({"tokens": list(counts), "items": num_items})
            output = execute(scheduled, *args, **kwargs)
            if scheduled.total_num_scheduled_tokens:
                step = Step(
                    len(chunks),
                    sum(chunks),
                    len(counts) - len(chunks),
                    num_items,
                    (start, self.clock.mark()),
                    1e3 * (time.perf_counter() - begun),
                    self.late.phase,
                )
                self.steps.append(step)
            return output

        return timed

    def _timed_sampling(self, sample: Callable) -> Callable:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = self.clock.mark()
            output = sample(*args, **kwargs)
            if self.is_on:
                self.sampling.append((start, self.clock.mark()))
            return output

        return timed

    def late_report(self) -> dict[str, Any]:
        """What was compiled and what was slow, and the steps that were slow on the device (host: `slow`)."""
        steps = [*self.early_steps, *self.steps]
        self.clock.settle()
        spans = [(self.clock.ms(*step.span), step) for step in steps]
        slow = [
            {"phase": step.phase, "device_ms": round(ms), "host_ms": round(step.host_ms)} | step.composition()
            for ms, step in spans
            if max(ms, step.host_ms) > 1e3 * SLOW_S
        ]
        return self.late.report() | {"slow_steps": slow}

    def report(self) -> dict[str, Any]:
        """Milliseconds. Decode: a step in which all only decode. Prefill: what a step's chunks add to that
        beside their encoding, by chunk."""
        self.is_on = False
        steps = list(self.steps)  # the engine runs on
        self.clock.settle()
        spans = [self.clock.ms(*step.span) for step in steps]
        encoder_ms = [self.clock.ms(*span) for span in self.encoder]
        sampling_ms = [self.clock.ms(*span) for span in self.sampling]
        num_items = sum(step.num_items for step in steps) or 1
        num_chunks = sum(step.num_chunks for step in steps) or 1
        decodes = [(ms, s) for ms, s in zip(spans, steps, strict=True) if not s.num_chunks]
        mixed = [(ms, s) for ms, s in zip(spans, steps, strict=True) if s.num_chunks]
        decode_ms = statistics.median(ms for ms, _ in decodes) if decodes else 0.0
        extra = (
            sum(ms for ms, _ in mixed)
            - sum(encoder_ms)
            - decode_ms * sum(s.num_decodes > 0 for _, s in mixed)
        )
        parts = sum(num for num, _ in self.features) or 1
        decoded = sum(step.num_decodes for step in steps)
        return {
            "steps": len(steps),
            "steps_with_chunks": len(mixed),
            "chunks": num_chunks,
            "tokens_of_a_chunk": round(sum(s.num_prefill for s in steps) / num_chunks, 1),
            "decoded_tokens": decoded,
            "batch_of_a_decode_step": round(decoded / max(1, sum(s.num_decodes > 0 for s in steps)), 1),
            "a_chunk_ms": {
                "features": round(sum(ms for _, ms in self.features) / parts, 3),
                "host_submit": round(statistics.median(self.submits), 3) if self.submits else None,
                "encoder": round(sum(encoder_ms) / num_items, 3),
                "prefill": round(max(0.0, extra) / num_chunks, 3),
                "decode": round(decode_ms * sum(s.num_decodes > 0 for s in steps) / num_chunks, 3),
                "sampling": round(sum(sampling_ms) / num_chunks, 3),
            },
            "a_step_ms": {
                "decode": spread([ms for ms, _ in decodes]),
                "with_chunks": spread([ms for ms, _ in mixed]),
                "encoder_call": spread(encoder_ms),
                "sampling": spread(sampling_ms),
                "features_call": spread([ms for _, ms in self.features]),
                "host": spread([step.host_ms for step in steps]),
                "submit": spread(self.submits),
            },
            "device_ms": round(sum(spans) + sum(sampling_ms), 1),
        }


def spread(values: Sequence[float]) -> dict[str, float] | None:
    if len(values) < 2:
        return None
    ordered = sorted(values)
    return {
        "p50": round(statistics.median(ordered), 3),
        "p90": round(ordered[int(0.9 * (len(ordered) - 1))], 3),
        "max": round(ordered[-1], 3),
    }


def encoder_of(model: Any) -> Any:
    """The module that encodes audio: Qwen-Omni's `audio_tower`, MiniCPM-o's `apm`."""
    for name in ("audio_tower", "apm"):
        if hasattr(model, name):
            return getattr(model, name)
    raise ValueError(f"no audio encoder is known in {type(model).__name__}")


class ProbedEngine(VllmEngine):
    """An engine that a probe looks into."""

    probe: Probe
    footprint: Any = None

    def _run(self, core: Any, on_results: Callable[[Sequence[Result]], None]) -> None:
        from engine.vllm.footprint import Footprint

        self.footprint = Footprint.of(core._core)
        self.probe.attach(core)
        self.probe.late.begin()
        super()._run(core, on_results)
