"""Sessions over vLLM's EngineCore. Belongs to one thread: no method here may be called from another.

Importing this module imports vLLM (about 9 s on two cores): `environment.prepare_process` comes before.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field, replace

from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from engine.engine import EngineLimits, EngineStats
from engine.models.family import ItemLayout
from engine.types import Finish, Result, Work
from engine.vllm.checks import Bounds, unfit
from engine.vllm.compaction.options import CompactionOptions
from engine.vllm.pieces import answer_room, cut
from engine.vllm.requests import RequestBuilder
from engine.vllm.scheduler import ParkingScheduler
from engine.vllm.sink_window.options import SinkWindowOptions
from engine.vllm.sink_window.spec import blocks_per_session

logger = logging.getLogger(__name__)

_GONE_KEPT = 4096  # sessions
_IDLE_STEPS_ALLOWED = 4  # steps that ran nothing although work waits; async scheduling has up to two in a row


@dataclass(slots=True)
class _Session:
    session_id: str
    generation: int
    request_id: str
    num_head_tokens: int  # S; its first work says it
    request: Request | None = None  # vLLM's record, from the first work on
    work: Work | None = None  # the unfinished one
    pieces: deque[Work] = field(default_factory=deque)  # of that work, still to be fed
    num_decoded: int = 0  # of that work, reported
    is_cancelled: bool = False  # that work's answer is not wanted any more
    num_evicted: int = 0  # tokens that were compacted away

    @property
    def is_in_flight(self) -> bool:
        """Whether a step of its last turn has not returned: until then its record must not change."""
        return self.request is not None and self.request.num_in_flight_tokens > 0

    @property
    def num_kv_tokens(self) -> int:
        if self.request is None:
            return 0
        return self.num_evicted + self.request.num_computed_tokens - self.request.num_output_placeholders


class SessionCore:
    """Turns works into vLLM requests and what vLLM returns into results.

    `submit`, `cancel` and `end` act between steps and at once; what they and `step` have to tell collects
    until `take_results`. A session whose work is refused is gone; others never notice.
    """

    def __init__(self, core: EngineCore, modality: str | None, layout: ItemLayout | None = None) -> None:
        """`core` is fresh and has a `ParkingScheduler`; `modality` is that of works with features, `layout`
        what these must be like."""
        self._core = core
        scheduler, config = core.scheduler, core.vllm_config
        assert isinstance(scheduler, ParkingScheduler)
        self._scheduler = scheduler
        self._pool = scheduler.kv_cache_manager.block_pool
        self._builder = RequestBuilder(config, modality, layout)
        block_size = scheduler.block_size
        window, compaction = SinkWindowOptions.of(config), CompactionOptions.of(config)
        self._max_turn_tokens = None if compaction is None else compaction.slack_tokens
        self.limits = EngineLimits(
            max_sessions=scheduler.max_num_running_reqs,
            max_session_tokens=(
                scheduler.max_model_len - 1 if compaction is None else compaction.max_session_tokens
            ),
            num_kv_blocks=self._pool.num_gpu_blocks - 1,  # block 0 is vLLM's placeholder
            block_size_tokens=block_size,
            blocks_per_session=blocks_per_session(scheduler.kv_cache_config, config),
            max_batch_tokens=scheduler.max_num_scheduled_tokens,
            max_head_tokens=None if window is None else window.max_sink_tokens,
            # What comes before the window was freed; a few tokens are decoded after a cancel, unreported.
            max_dropped_tokens=_max_dropped_tokens(window, compaction),
        )
        max_item_tokens = min(
            scheduler.max_num_encoder_input_tokens,
            scheduler.encoder_cache_manager.cache_size,
            self._max_turn_tokens or scheduler.max_model_len,
        )
        self._bounds = Bounds(
            vocab_size=config.model_config.get_vocab_size(),
            max_session_tokens=self.limits.max_session_tokens,
            max_item_tokens=max_item_tokens if modality else 0,
            max_head_tokens=self.limits.max_head_tokens,
        )
        self._sessions: dict[str, _Session] = {}
        self._by_request: dict[str, _Session] = {}
        self._held: dict[str, _Session] = {}  # by session: their next piece waits for a step in flight
        self._gone: dict[str, int] = {}  # session -> its newest generation that ended or was refused
        self._results: list[Result] = []
        self._num_requests = 0
        self._num_steps = 0
        self._num_idle_steps = 0
        self._last_step_s = 0.0

    # commands

    def submit(self, work: Work) -> None:
        """Queue the work for the next step, or refuse it."""
        session = self._sessions.get(work.session_id)
        if session is not None and session.generation < work.generation:
            self._drop(session)
            session = None
        reason = self._why_not(session, work)
        if reason is None:
            session = session or self._open(work)
            session.work, session.is_cancelled, session.num_decoded = work, False, 0
            session.pieces = deque(cut(work, self._max_turn_tokens))
            self._feed(session)
        else:
            self._refuse(work, reason)

    def cancel(self, session_id: str, generation: int) -> None:
        session = self._find(session_id, generation)
        if session is None or session.work is None:
            return
        session.is_cancelled = True
        if session.session_id in self._held or session.request is None:
            return  # a piece that waits to be fed will decode nothing
        if self._scheduler.cancel_turn(session.request_id):
            self._finish(session, (), Finish.CANCELLED)

    def end(self, session_id: str, generation: int) -> None:
        session = self._find(session_id, generation)
        if session is not None:
            self._drop(session)
        self._forget(session_id, generation)

    # stepping

    def has_work(self) -> bool:
        """Whether `step` would do something (also: tell the worker who left)."""
        core, scheduler = self._core, self._scheduler
        return bool(scheduler.has_requests() or core.batch_queue or scheduler.lost or self._held)

    def step(self) -> None:
        started = time.monotonic()
        outputs, has_run = self._core.step_fn()
        self._core.post_step(has_run)
        for per_client in (outputs or {}).values():
            for output in per_client.outputs:
                self._take(output)
        waits = not has_run and self._scheduler.has_unfinished_requests()
        self._num_idle_steps = self._num_idle_steps + 1 if waits else 0
        if self._num_idle_steps > _IDLE_STEPS_ALLOWED:
            self._scheduler.give_up_one()
        self._end_lost()
        for session in [held for held in self._held.values() if not held.is_in_flight]:
            self._feed(session)
        self._num_steps += 1
        self._last_step_s = time.monotonic() - started

    def take_results(self) -> list[Result]:
        results, self._results = self._results, []
        return results

    def stats(self) -> EngineStats:
        return EngineStats(
            kv_blocks_used=self.limits.num_kv_blocks - self._pool.get_num_free_blocks(),
            num_sessions=len(self._sessions),
            num_steps=self._num_steps,
            last_step_s=self._last_step_s,
        )

    def shutdown(self) -> None:
        self._core.shutdown()

    # one session's way through

    def _why_not(self, session: _Session | None, work: Work) -> str | None:
        if session is None:
            if self._gone.get(work.session_id, -1) >= work.generation:
                return f"Generation {work.generation} of this session has ended."
            num_sessions = len(self._sessions) + 1
            if num_sessions > self.limits.max_sessions:
                return f"All {self.limits.max_sessions} session slots are taken."
            if num_sessions * self.limits.blocks_per_session > self.limits.num_kv_blocks:
                return "The KV cache cannot hold one more whole session."
            if work.keep_tokens:
                return f"A new session has no {work.keep_tokens} tokens to keep."
            return unfit(work, 0, self._bounds)
        if work.generation < session.generation:
            return f"Generation {work.generation} is over; the session is at {session.generation}."
        if session.work is not None:
            return f"Work {session.work.seq} of this session is not finished."
        if work.num_head_tokens != session.num_head_tokens:
            return (
                f"A conversation's head cannot change: it has {session.num_head_tokens} tokens, this work "
                f"says {work.num_head_tokens}."
            )
        num_tokens = session.num_kv_tokens
        if work.keep_tokens is not None:
            reason = self._scheduler.why_not_forget(session.request_id, work.keep_tokens, session.num_evicted)
            if reason is not None:
                return f"Of its {num_tokens} tokens the session cannot keep {work.keep_tokens}: {reason}."
            num_tokens = work.keep_tokens
        return unfit(work, num_tokens, self._bounds)

    def _open(self, work: Work) -> _Session:
        # The number makes the id new for ever: what is in flight for an aborted request must find no other.
        self._num_requests += 1
        request_id = f"{work.session_id}:{work.generation}:{self._num_requests}"
        session = _Session(work.session_id, work.generation, request_id, work.num_head_tokens)
        self._sessions[work.session_id] = session
        self._by_request[session.request_id] = session
        return session

    def _take(self, output: EngineCoreOutput) -> None:
        session = self._by_request.get(output.request_id)
        if session is None or session.work is None:
            return  # it ended while the step ran
        work, tokens, reason = session.work, tuple(output.new_token_ids), output.finish_reason
        if reason not in (None, FinishReason.STOP, FinishReason.LENGTH):
            self._refuse(work, f"vLLM ended the request: {reason}.")
            return
        if session.pieces:  # what was sampled behind a piece that is not the last is nobody's
            if reason is not None:
                self._feed(session)
            return
        if work.max_tokens == 0 or (session.is_cancelled and not session.num_decoded):
            tokens = ()
        session.num_decoded += len(tokens)
        if reason is None:
            if tokens:
                self._report(session, work, tokens, None)
        elif not tokens:
            self._finish(session, (), Finish.CANCELLED if session.is_cancelled else Finish.FED)
        elif reason is FinishReason.STOP:
            self._finish(session, tokens[:-1], Finish.STOP, tokens[-1])
        elif session.is_cancelled:
            self._finish(session, tokens, Finish.CANCELLED)
        elif session.num_decoded < work.max_tokens:
            self._go_on(session, work, tokens)
        else:
            self._finish(session, tokens, Finish.LENGTH)

    def _go_on(self, session: _Session, work: Work, tokens: tuple[int, ...]) -> None:
        """The answer's turn grew as long as one may be: its last token begins the next."""
        self._report(session, work, tokens, None)
        left = work.max_tokens - session.num_decoded
        piece = replace(work, token_ids=tokens[-1:], features=(), keep_tokens=None, max_tokens=left)
        session.pieces.append(piece)
        self._feed(session)

    def _feed(self, session: _Session) -> None:
        """Give vLLM the next piece of the session's work, as a turn of its own."""
        if session.is_in_flight:
            self._held[session.session_id] = session
            return
        self._held.pop(session.session_id, None)
        piece = session.pieces.popleft()
        room = 0 if session.is_cancelled else answer_room(piece, self._max_turn_tokens)
        try:
            built = self._builder.build(session.request_id, replace(piece, max_tokens=room))
            request, _ = self._core.preprocess_add_request(built)
        except Exception as error:  # whatever torch makes of another's tensors: it ends that session only
            self._refuse(piece, f"No request can be made of this work: {error}")
            return
        if session.request is not None:
            kept = None if piece.keep_tokens is None else piece.keep_tokens - session.num_evicted
            session.num_evicted += self._scheduler.tidy(session.request_id, kept)
        self._core.add_request(request)
        session.request = self._scheduler.requests.get(session.request_id)

    def _finish(
        self, session: _Session, tokens: tuple[int, ...], finish: Finish, stop_token: int | None = None
    ) -> None:
        work, session.work = session.work, None
        assert work is not None
        self._report(session, work, tokens, finish, stop_token)

    def _report(
        self,
        session: _Session,
        work: Work,
        tokens: tuple[int, ...],
        finish: Finish | None,
        stop_token: int | None = None,
    ) -> None:
        self._results.append(
            Result(
                session.session_id,
                session.generation,
                work.seq,
                tokens,
                finish,
                session.num_kv_tokens,
                stop_token=stop_token,
            )
        )

    def _refuse(self, work: Work, reason: str) -> None:
        session = self._find(work.session_id, work.generation)
        if session is not None:
            self._drop(session)
        self._forget(work.session_id, work.generation)
        self._results.append(
            Result(work.session_id, work.generation, work.seq, (), Finish.REFUSED, 0, reason)
        )

    def _end_lost(self) -> None:
        lost, self._scheduler.lost = self._scheduler.lost, {}
        for request_id, reason in lost.items():
            session = self._by_request.get(request_id)
            if session is not None and session.work is not None:
                logger.error("session %s ends: %s", session.session_id, reason)
                self._refuse(session.work, reason)

    def _drop(self, session: _Session) -> None:
        del self._sessions[session.session_id]
        del self._by_request[session.request_id]
        self._held.pop(session.session_id, None)
        self._core.abort_requests([session.request_id])

    def _forget(self, session_id: str, generation: int) -> None:
        """A late work must not bring a session back that nobody would end."""
        self._gone[session_id] = max(generation, self._gone.pop(session_id, -1))
        if len(self._gone) > _GONE_KEPT:
            del self._gone[next(iter(self._gone))]

    def _find(self, session_id: str, generation: int) -> _Session | None:
        session = self._sessions.get(session_id)
        return session if session is not None and session.generation == generation else None


def _max_dropped_tokens(window: SinkWindowOptions | None, compaction: CompactionOptions | None) -> int | None:
    """Going back takes tokens off the window's end, and its beginning is gone."""
    if window is None:
        return None
    return 0 if compaction is None else max(0, window.window_tokens - 32)
