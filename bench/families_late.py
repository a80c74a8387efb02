"""What an engine that says it is ready still has to compile, and what keeps it busy for too long.

Kernels compiled by Triton and graphs by torch.compile report themselves. What else stalls (a library that
loads, a device that does not answer) is seen from outside: a thread of its own looks at those who work, and
notes where in the code they stand once they need more than `SLOW_S`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

SLOW_S = 0.5
LOOK_S = 0.1  # between two looks at those who work
MAX_STACKS = 4  # kept of one work
MAX_EVENTS = 200  # kept of a kind and a phase; all are counted
FRAMES = 14  # of a stack, the innermost


@dataclass
class _Busy:
    what: str
    thread_id: int
    since: float
    details: list[dict[str, Any]] = field(default_factory=list)
    stacks: list[str] = field(default_factory=list)


class Late:
    """Figures by phase; `phase` is set by who knows it. Threads write, each its own events."""

    def __init__(self) -> None:
        self.phase = "rehearsal"
        self._begun = time.monotonic()
        self._compiles: list[dict[str, Any]] = []
        self._slow: list[dict[str, Any]] = []
        self._busy: dict[int, _Busy] = {}
        self._compile_begun: dict[int, float] = {}
        self._is_over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="late", daemon=True)

    def begin(self) -> None:
        """From now on; on the thread that has started the engine."""
        self._begun = time.monotonic()
        self._listen_to_triton()
        self._listen_to_dynamo()
        self._watcher.start()

    # who works

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[list[dict[str, Any]]]:
        """Around a work of this thread, one at a time; what is appended to the list describes it."""
        mine = _Busy(what, threading.get_ident(), time.monotonic())
        self._busy[mine.thread_id] = mine
        try:
            yield mine.details
        finally:
            del self._busy[mine.thread_id]
            self._end(mine)

    def beat(self) -> None:
        """The event loop is alive; call several times within `SLOW_S`, on its thread."""
        thread_id = threading.get_ident()
        if (last := self._busy.get(thread_id)) is not None:
            self._end(last)
        self._busy[thread_id] = _Busy("event loop", thread_id, time.monotonic())

    def _end(self, work: _Busy) -> None:
        took = time.monotonic() - work.since
        if took > SLOW_S:
            self._note(self._slow, work.since, took, what=work.what, of=work.details, stacks=work.stacks)

    def _watch(self) -> None:
        while not self._is_over.wait(LOOK_S):
            now = time.monotonic()
            slow = [work for work in list(self._busy.values()) if now - work.since > SLOW_S]
            frames = sys._current_frames() if slow else {}
            for work in slow:
                frame = frames.get(work.thread_id)
                if frame is None or len(work.stacks) >= MAX_STACKS:
                    continue
                stack = " < ".join(
                    f"{f.name} {'/'.join(f.filename.split('/')[-3:])}:{f.lineno}"
                    for f in reversed(traceback.extract_stack(frame)[-FRAMES:])
                )
                if stack not in work.stacks:
                    work.stacks.append(stack)

    # who compiles

    def _listen_to_triton(self) -> None:
        try:
            from triton import knobs
        except ImportError:
            return
        before = getattr(knobs.compilation, "listener", None)

        def on_compile(**values: Any) -> None:
            if before is not None:
                before(**values)
            # Triton's versions differ in what they hand over; an exception here would end the step.
            name = getattr(values.get("src"), "name", "?")
            took = getattr(values.get("times"), "total", 0) / 1e6  # microseconds
            cached = values.get("cache_hit")
            self._note(self._compiles, time.monotonic() - took, took, what=f"triton {name}", cached=cached)

        knobs.compilation.listener = on_compile

    def _listen_to_dynamo(self) -> None:
        from torch._dynamo.callback import callback_handler

        def on_start(*_: Any) -> None:
            self._compile_begun[threading.get_ident()] = time.monotonic()

        def on_end(*args: Any) -> None:
            begun = self._compile_begun.pop(threading.get_ident(), time.monotonic())
            self._note(self._compiles, begun, time.monotonic() - begun, what=f"torch.compile {args}")

        callback_handler.register_start_callback(on_start)
        callback_handler.register_end_callback(on_end)

    # what is told

    def _note(self, to: list[dict[str, Any]], begun: float, took: float, **values: Any) -> None:
        to.append(
            {"phase": self.phase, "at_s": round(begun - self._begun, 2), "took_s": round(took, 3)} | values
        )

    def report(self) -> dict[str, Any]:
        """By phase: what was compiled, by name, and each work that was slow."""
        self._is_over.set()
        compiled: dict[str, dict[str, Any]] = {}
        for event in self._compiles:
            phase = compiled.setdefault(event["phase"], {"count": 0, "took_s": 0.0, "events": []})
            phase["count"] += 1
            phase["took_s"] = round(phase["took_s"] + event["took_s"], 3)
            if len(phase["events"]) < MAX_EVENTS:
                phase["events"].append({k: v for k, v in event.items() if k != "phase"})
        return {"compiled": compiled, "slow": self._slow[:MAX_EVENTS], "num_slow": len(self._slow)}
