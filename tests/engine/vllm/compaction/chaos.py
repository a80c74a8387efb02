"""Sessions that do anything at any moment, against a plain count of what each must hold."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from engine.types import Finish, Result, Sampling, Work
from engine.vllm.compaction.options import CompactionOptions, compacted_len
from engine.vllm.sink_window.layout import max_blocks
from engine.vllm.sink_window.options import SinkWindowOptions

HEAD = 20  # tokens; not a multiple of a block


@dataclass
class Plain:
    """One session: what it must have computed, evicted tokens counted."""

    name: str
    num_kv_tokens: int = 0
    owed: tuple[int, ...] = ()  # decoded last, not computed
    num_answered: int = 0  # of the last work, computed
    work: Work | None = None
    decoded: list[int] = field(default_factory=list)
    is_cancelled: bool = False


class Chaos:
    """Drives a `SessionCore` whose engine has compaction on. Raises AssertionError for whatever is wrong."""

    def __init__(self, core: Any, seed: int, num_sessions: int, vocab_size: int) -> None:
        config = core._core.vllm_config
        window, compaction = SinkWindowOptions.of(config), CompactionOptions.of(config)
        assert window is not None and compaction is not None
        self.core, self.seed, self.rng = core, seed, random.Random(seed)
        self.slack, self.window = compaction.slack_tokens, window.window_tokens
        block_size = core.limits.block_size_tokens
        steps_in_flight = core._core.batch_queue_size if core._core.batch_queue is not None else 1
        in_flight = steps_in_flight * min(window.max_chunk_tokens, core.limits.max_batch_tokens)
        self.max_blocks = max_blocks(HEAD, self.window, in_flight, 1 << 20, block_size)
        self.bound = compacted_len(HEAD, self.window, self.slack, block_size)
        self.vocab_size = vocab_size
        self.sessions: dict[str, Plain] = {}
        self.num_sessions, self.num_opened, self.seq = num_sessions, 0, 0
        self.counts: Counter[str] = Counter()

    def run(self, num_steps: int) -> Counter[str]:
        """How often each thing happened; at the end nothing is left in the engine."""
        for _ in range(num_steps):
            self.act()
            if self.core.has_work():
                self.core.step()
            self.check()
        for name in list(self.sessions):
            self.core.end(name, 0)
        while self.core.has_work():
            self.core.step()
        stats = self.core.stats()
        assert (stats.kv_blocks_used, stats.num_sessions) == (0, 0)
        return self.counts

    def act(self) -> None:
        rng = self.rng
        if len(self.sessions) < self.num_sessions and rng.random() < 0.3:
            self.num_opened += 1
            session = Plain(f"s{self.seed}-{self.num_opened}")
            self.sessions[session.name] = session
            self.submit(session, [self.token() for _ in range(HEAD + rng.randint(0, 30))])
        for session in list(self.sessions.values()):
            if session.work is None and rng.random() < 0.5:
                size = rng.choice([0, 1, 5, 30, 30, 30, 60, 60, self.slack, 3 * self.window])
                self.submit(session, [self.token() for _ in range(size)])
            elif session.work is not None and rng.random() < 0.03:
                session.is_cancelled = True
                self.core.cancel(session.name, 0)
            elif rng.random() < 0.006:
                self.counts["ended at work" if session.work else "ended"] += 1
                self.core.end(session.name, 0)
                del self.sessions[session.name]

    def submit(self, session: Plain, tokens: list[int]) -> None:
        rng, keep = self.rng, None
        if session.num_answered and rng.random() < 0.3:
            keep = session.num_kv_tokens - rng.randint(0, min(session.num_answered, self.window // 2))
            self.counts["went back"] += 1
        owed = () if keep is not None else session.owed
        given = (*owed, *tokens) or (self.token(),)
        max_tokens = rng.choice([0, 0, 1, 2, 8, 20, 20, 2 * self.slack])
        stop = range(self.vocab_size) if rng.random() < 0.1 else range(0, self.vocab_size, 23)
        self.seq += 1
        session.work = Work(
            session.name,
            0,
            self.seq,
            given,
            num_head_tokens=HEAD,
            keep_tokens=keep,
            max_tokens=max_tokens,
            sampling=Sampling(stop_token_ids=tuple(stop)),
        )
        session.decoded, session.is_cancelled = [], False
        if keep is not None:
            session.num_kv_tokens = keep
        self.core.submit(session.work)

    def check(self) -> None:
        for result in self.core.take_results():
            session = self.sessions[result.session_id]
            assert session.work is not None and result.seq == session.work.seq, result
            session.decoded += result.token_ids
            if result.finish is not None:
                self.finish(session, session.work, result)
        for session in self.core._sessions.values():
            if session.request is not None and session.request.num_computed_tokens:
                assert session.request.num_tokens <= self.bound
                assert len(session.request.mm_features) == 0
                for manager in self.core._scheduler._managers:
                    table = manager.req_to_blocks[session.request_id]
                    held = sum(not block.is_null for block in table)
                    assert held <= self.max_blocks
                    assert len(table) * manager.block_size <= self.bound + manager.block_size

    def finish(self, session: Plain, work: Work, result: Result) -> None:
        assert result.finish is not Finish.REFUSED, result.error
        self.counts[str(result.finish)] += 1
        number = len(session.decoded)
        if result.finish is Finish.FED:
            assert number == work.max_tokens == 0
        elif result.finish is Finish.LENGTH:
            assert number == work.max_tokens
        elif result.finish is Finish.CANCELLED:
            assert session.is_cancelled and number <= work.max_tokens
        elif number == 0:
            self.counts["stopped at once"] += 1
        in_cache = number if result.finish is Finish.STOP else max(0, number - 1)
        session.num_kv_tokens += len(work.token_ids) + in_cache
        assert result.num_kv_tokens == session.num_kv_tokens, (result, session)
        session.owed = () if result.finish is Finish.STOP else tuple(session.decoded[-1:])
        session.num_answered, session.work = in_cache, None

    def token(self) -> int:
        return self.rng.randrange(3, self.vocab_size)
