"""vLLM's scheduler, for sessions that mostly wait.

A session between two works is a request in the state WAITING_FOR_STREAMING_REQ. vLLM keeps it in a waiting
queue and looks at it in every step; here it leaves the queues and waits in `parked`, so that a step costs the
same with 500 of them. It goes on holding its KV blocks and its request slot, which vLLM counts by
`num_waiting_for_streaming_input`.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus, StreamingUpdate

from engine.vllm.compaction.options import CompactionOptions
from engine.vllm.compaction.parked import Move, compact, forget, why_not_forget
from engine.vllm.compaction.worker import attach_moves
from engine.vllm.sink_window.heads import head_tokens
from engine.vllm.sink_window.spec import SinkWindowManager


class ParkingScheduler(Scheduler):
    """Parks idle sessions, cancels a turn without ending its session, and never lets a bad request in.

    `lost` maps request ids to the reason why the session cannot go on; the engine takes them out after each
    step and ends those sessions, and only those.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.parked: dict[str, Request] = {}
        self.lost: dict[str, str] = {}
        self._managers = self.kv_cache_manager.coordinator.single_type_managers
        self._compaction = CompactionOptions.of(self.vllm_config)
        self._moves: list[Move] = []  # go with the next step
        if self.vllm_config.device_config.device_type == "cpu":
            # vLLM's CPU kernel multiplies what lies behind a session's last token, in its last block, by 0:
            # NaN that another session left there would come through. So have new blocks cleared.
            self.needs_kv_cache_zeroing = True
            for manager in self._managers:
                manager._record_new_block_ids = True

    # parking

    def _enqueue_waiting_request(self, request: Request) -> None:
        if request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
            self.parked[request.request_id] = request
            # Else the gap its last chunk left would be held until its next one.
            done = request.num_computed_tokens - request.num_in_flight_tokens
            self.kv_cache_manager.remove_skipped_blocks(request.request_id, max(0, done))
        else:
            super()._enqueue_waiting_request(request)

    def _update_request_as_session(self, session: Request, update: StreamingUpdate) -> None:
        super()._update_request_as_session(session, update)
        if self.parked.pop(session.request_id, None) is not None:
            self._enqueue_waiting_request(session)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        finished = super().finish_requests(request_ids, finished_status)
        for request in finished:
            self.parked.pop(request.request_id, None)
        return finished

    def get_num_unfinished_requests(self) -> int:
        # vLLM takes the parked off the number in its queues, where ours are not.
        return super().get_num_unfinished_requests() + len(self.parked)

    # bounded state

    def _keep_head(self, request: Request) -> None:
        """Tell the KV managers the request's S, before they allocate for it."""
        for manager in self._managers:
            if isinstance(manager, SinkWindowManager):
                manager.heads[request.request_id] = head_tokens(request.sampling_params)

    @property
    def is_compactable(self) -> bool:
        """Whether every layer has the same gap, in the same blocks."""
        return len(self._managers) == 1 and isinstance(self._managers[0], SinkWindowManager)

    def why_not_forget(self, request_id: str, keep_tokens: int, num_evicted: int) -> str | None:
        """Why a parked session cannot go back to so many tokens, those evicted counted; None if it can."""
        request = self.requests[request_id]
        num_head_tokens = head_tokens(request.sampling_params)
        closes_gap = self._compaction is not None
        return why_not_forget(request, self._managers, keep_tokens, num_evicted, num_head_tokens, closes_gap)

    def tidy(self, request_id: str, keep_tokens: int | None = None) -> int:
        """Before a parked session's next turn: forget what is beyond `keep_tokens`, cut out what was freed.

        `keep_tokens` counts from the record's begin. No step of the session may be in flight. Returns by how
        many tokens the record shrank at its gap.
        """
        request = self.requests[request_id]
        assert request.status == RequestStatus.WAITING_FOR_STREAMING_REQ and not request.num_in_flight_tokens
        self.encoder_cache_manager.free(request)
        request.mm_features = []  # all of them are in the KV cache: from now on their tokens are like others
        goes_back = False
        if keep_tokens is not None and keep_tokens < request.num_computed_tokens:
            goes_back = True
            forget(request, self._managers, keep_tokens)
        else:
            self.kv_cache_manager.remove_skipped_blocks(request_id, request.num_computed_tokens)
        if self._compaction is None:
            return 0
        (manager,) = self._managers
        assert isinstance(manager, SinkWindowManager)
        # Having gone back, a query would look for its window in blocks that are freed: close the gap at once.
        move = compact(request, manager, 1 if goes_back else self._compaction.slack_tokens)
        if move is None:
            return 0
        self._moves.append(move)
        return move.distance_tokens

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        output = super().schedule(throttle_prefills)
        if self._moves:
            moves, self._moves = self._moves, []
            attach_moves(output, [move for move in moves if move.request_id in self.requests])
        return output

    def get_request_counts(self) -> tuple[int, int]:
        """Running and waiting requests. vLLM lets a lone one take a whole batch in, whatever the limit of a
        chunk; that limit is part of what bounds a session's blocks, so none is ever alone here."""
        num_running, num_waiting = super().get_request_counts()
        return num_running, num_waiting + (num_running + num_waiting == 1)

    # cancelling

    def cancel_turn(self, request_id: str) -> bool:
        """End the session's turn, keep the session.

        True: it was decoding and is parked now, as if its last delivered token had been its last; a step in
        flight for it is dropped when it returns. False: its tokens are still being taken in; that goes on,
        and the first token sampled after them ends the turn.
        """
        request = self.requests[request_id]
        if request.status != RequestStatus.RUNNING or request.num_output_tokens == 0:
            request.max_tokens = 1
            return False
        self.running.remove(request)
        self._handle_stopped_request(request)
        return True

    # the last line of defence

    def add_request(self, request: Request) -> None:
        reason = self._unfit(request)
        if reason is not None:
            self.lost[request.request_id] = reason
            return
        if request.request_id not in self.requests:
            self._keep_head(request)
        super().add_request(request)

    def _unfit(self, request: Request) -> str | None:
        existing = self.requests.get(request.request_id)
        num_tokens = len(request.prompt_token_ids or ())
        if num_tokens == 0:
            return "A work needs at least one token."
        if existing is not None:
            if existing.status != RequestStatus.WAITING_FOR_STREAMING_REQ:
                return "The session's last work is not finished."
            num_tokens += existing.num_computed_tokens
        if num_tokens + request.max_tokens > self.max_model_len:
            return f"The session would grow beyond {self.max_model_len} tokens."
        return None

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        super()._preempt_request(request, timestamp, drop_stale_output)
        self._keep_head(request)
        self.lost[request.request_id] = "The KV cache ran out of blocks, and this session lost its own."

    def give_up_one(self) -> None:
        """Nothing can be scheduled, nothing runs: sacrifice the request that stands first in the line."""
        for line in (self.kv_holding_waiting, self.waiting, self.running):
            if line:
                self.lost[next(iter(line)).request_id] = "No room was left in the engine to go on."
                return


class AsyncParkingScheduler(ParkingScheduler, AsyncScheduler):
    """The same over vLLM's asynchronous scheduling, which CUDA uses."""
