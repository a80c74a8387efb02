"""An engine that computes nothing: it echoes, and refuses exactly what a real one must refuse.

`NullCore` is the state and one step, without thread or clock; `NullEngine` drives it on a thread of its own.
An answer is "echo: " and the bytes of the user's turn (the tokens since the last `OPEN`), then a stop.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.engine import EngineError, EngineLimits, EngineStats, OnFailure, OnResults
from engine.models.null import OPEN, encode
from engine.types import Finish, Result, Work

_Key = tuple[str, int]  # session id, generation
DEFAULT_LIMITS = EngineLimits(
    max_sessions=4097,  # the most a server can be asked for, and its rehearsal: there is no memory to fill
    max_session_tokens=8192,
    num_kv_blocks=4097 * 512,
    block_size_tokens=16,
    blocks_per_session=512,
    max_batch_tokens=8192,
)


@dataclass(slots=True)
class _State:
    """One generation of one session."""

    num_tokens: int = 0  # taken in and decoded
    last_token: int | None = None  # decoded, but not in the KV cache
    heard: list[int] = field(default_factory=list)  # bytes of the user's turn so far, the newest ones
    answer: list[int] = field(default_factory=list)  # what is still to be said
    work: Work | None = None  # unfinished
    is_fed: bool = False  # the work's tokens were taken in
    num_decoded: int = 0  # by this work
    is_cancelled: bool = False

    @property
    def num_kv_tokens(self) -> int:
        return self.num_tokens - (self.last_token is not None)


class NullCore:
    """Sessions, their rules and their echoes. Not thread-safe."""

    HEARD_KEPT = 512  # bytes of a turn that are echoed
    ENDED_KEPT = 4096  # ended generations that are remembered, so that a late work is refused

    def __init__(self, limits: EngineLimits = DEFAULT_LIMITS, tokens_per_step: int = 4) -> None:
        self.limits = limits
        self._tokens_per_step = tokens_per_step
        self._states: dict[_Key, _State] = {}
        self._ended: OrderedDict[str, int] = OrderedDict()  # session -> its newest ended generation
        self._refused: list[Result] = []  # reported by the next step
        self.num_steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self._refused) or any(state.work for state in self._states.values())

    def stats(self, last_step_s: float = 0.0) -> EngineStats:
        size = self.limits.block_size_tokens
        blocks = sum(-(-state.num_kv_tokens // size) for state in self._states.values())
        return EngineStats(blocks, len(self._states), self.num_steps, last_step_s)

    def submit(self, work: Work) -> None:
        key = (work.session_id, work.generation)
        error = self._why_not(work)
        if error is not None:
            self._forget(key)
            self._refused.append(
                Result(work.session_id, work.generation, work.seq, (), Finish.REFUSED, 0, error)
            )
            return
        state = self._states.setdefault(key, _State())
        state.work, state.is_fed, state.num_decoded, state.is_cancelled = work, False, 0, False

    def cancel(self, session_id: str, generation: int) -> None:
        state = self._states.get((session_id, generation))
        if state is not None and state.work is not None:
            state.is_cancelled = True

    def end(self, session_id: str, generation: int) -> None:
        key = (session_id, generation)
        self._refused = [r for r in self._refused if (r.session_id, r.generation) != key]
        if key in self._states:
            self._forget(key)

    def step(self) -> list[Result]:
        """Take in what is new, decode up to `tokens_per_step` for each session at work."""
        self.num_steps += 1
        results, self._refused = self._refused, []
        for state in self._states.values():
            if state.work is not None:
                results.append(self._step_one(state, state.work))
        return results

    def _why_not(self, work: Work) -> str | None:
        """The sentence of a refusal, None for a work that can run."""
        state = self._states.get((work.session_id, work.generation))
        room = self.limits.max_session_tokens
        if state is None and work.generation <= self._ended.get(work.session_id, -1):
            return f"Generation {work.generation} of this session has ended."
        if state is None and len(self._states) >= self.limits.max_sessions:
            return f"All {self.limits.max_sessions} session slots are taken."
        if state is not None and state.work is not None:
            return f"Work {state.work.seq} of this session is not finished."
        if not work.token_ids:
            return "A work needs at least one token."
        if work.max_tokens < 0:
            return f"max_tokens must not be negative, got {work.max_tokens}."
        if any(not 0 <= f.offset <= len(work.token_ids) - f.num_tokens for f in work.features):
            return "Features reach beyond the work's tokens."
        used = state.num_kv_tokens if state is not None else 0
        if work.keep_tokens is not None:
            if not min(work.num_head_tokens, used) <= work.keep_tokens <= used:
                return f"A session of {used} tokens cannot go back to {work.keep_tokens}."
            used = work.keep_tokens
        if room is not None and used + len(work.token_ids) + work.max_tokens > room:
            return (
                f"The session would grow beyond {room} tokens: {used} are held, "
                f"{len(work.token_ids)} come in, {work.max_tokens} may be decoded."
            )
        return None

    def _step_one(self, state: _State, work: Work) -> Result:
        said: tuple[int, ...] = ()
        finish: Finish | None = None
        if not state.is_fed:
            self._feed(state, work)
        if state.is_cancelled:
            finish = Finish.CANCELLED
        elif work.max_tokens == 0:
            finish = Finish.FED
        else:
            said, finish = self._decode(state, work)
        if finish is not None:
            state.work = None
        return Result(work.session_id, work.generation, work.seq, said, finish, state.num_kv_tokens)

    def _feed(self, state: _State, work: Work) -> None:
        # An answer cut short by max_tokens, nothing new:
        goes_on = work.token_ids == (state.last_token,) and work.keep_tokens is None
        held = state.num_kv_tokens if work.keep_tokens is None else work.keep_tokens
        state.num_tokens = held + len(work.token_ids)
        state.last_token = None
        state.is_fed = True
        if goes_on:
            return
        for token in work.token_ids:
            if token == OPEN:
                state.heard.clear()
            elif token < 256:
                state.heard.append(token)
        del state.heard[: -self.HEARD_KEPT]
        state.answer = [*encode("echo: "), *state.heard] if work.max_tokens else []

    def _decode(self, state: _State, work: Work) -> tuple[tuple[int, ...], Finish | None]:
        count = min(self._tokens_per_step, work.max_tokens - state.num_decoded)
        said, state.answer = tuple(state.answer[:count]), state.answer[count:]
        state.num_decoded += len(said)
        state.num_tokens += len(said)
        if (
            len(said) < count
        ):  # nothing left: the next token is the stop, which puts the last one in the cache
            state.last_token = None
            return said, Finish.STOP
        state.last_token = said[-1]
        return said, Finish.LENGTH if state.num_decoded == work.max_tokens else None

    def _forget(self, key: _Key) -> None:
        self._states.pop(key, None)
        session_id, generation = key
        self._ended[session_id] = max(generation, self._ended.pop(session_id, -1))
        if len(self._ended) > self.ENDED_KEPT:
            self._ended.popitem(last=False)


class NullEngine:
    """`NullCore` on a thread, one step each `step_s` while there is work; keeps `Engine`'s promises."""

    def __init__(
        self, limits: EngineLimits = DEFAULT_LIMITS, step_s: float = 0.0, tokens_per_step: int = 4
    ) -> None:
        self.limits = limits
        self._core = NullCore(limits, tokens_per_step)
        self._step_s = step_s
        # Held while results are handed over too, so that none follows an `end`; re-entrant, so that
        # `on_results` may submit.
        self._changed = threading.Condition(threading.RLock())
        self._failure: EngineError | None = None
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def stats(self) -> EngineStats:
        with self._changed:
            return self._core.stats(self._step_s)

    def start(self, on_results: OnResults, on_failure: OnFailure) -> None:
        if self._thread is not None:
            raise EngineError("The engine was started before.")
        self._thread = threading.Thread(
            target=self._run, args=(on_results, on_failure), name="null-engine", daemon=True
        )
        self._thread.start()

    def submit(self, batch: Sequence[Work]) -> None:
        with self._changed:
            if self._is_usable:
                for work in batch:
                    self._core.submit(work)
                self._changed.notify_all()

    def cancel(self, session_id: str, generation: int) -> None:
        with self._changed:
            if self._is_usable:
                self._core.cancel(session_id, generation)

    def end(self, session_id: str, generation: int) -> None:
        with self._changed:
            if self._is_usable:
                self._core.end(session_id, generation)

    def break_down(self, reason: str) -> None:
        """Die like a real engine would: `on_failure` is called, everything in it is lost. For tests."""
        with self._changed:
            self._failure = EngineError(reason)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def _is_usable(self) -> bool:
        return self._failure is None and not self._is_closing

    def _run(self, on_results: OnResults, on_failure: OnFailure) -> None:
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._core.has_work or not self._is_usable)
                if self._step_s > 0 and self._is_usable:
                    # What arrives meanwhile joins this step; a fault or a close ends the wait.
                    self._changed.wait_for(lambda: not self._is_usable, timeout=self._step_s)
                if self._failure is not None and not self._is_closing:
                    on_failure(self._failure)
                    return
                if self._is_closing:
                    return
                results = self._core.step()
                if results:
                    on_results(results)
