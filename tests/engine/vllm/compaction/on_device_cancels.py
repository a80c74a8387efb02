"""Cancels past the window without compaction: what is in flight for a turn must spoil nothing behind it.

Twelve sessions are cancelled at random moments, each also in the state it was left in by the cancel before.
Beside them one takes in and two answer. The one computes what it computes alone; those who answer lose no
token; and whoever was cancelled has in the cache what a new session computes from the same tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from engine.models.family import EngineRecipe
from engine.types import Finish, Result, Work
from tests.engine.vllm.compaction.on_device_engine import (
    SINKS,
    VOCAB_SIZE,
    W,
    make_core,
    relative_error,
)
from tests.support.logits_watch import LogitsWatch

NUM_CANCELLED, NUM_ANSWERING, NUM_COMPARED = 12, 2, 4
MAX_TOKENS = 80  # of an answer
MAX_ERROR = 0.06  # of two bf16 computations of this model, each 0.03 off


@dataclass
class Plain:
    """A session as it must be."""

    name: str
    tokens: list[int] = field(default_factory=list)  # computed
    owed: tuple[int, ...] = ()
    work: Work | None = None
    answer: list[int] = field(default_factory=list)
    is_cancelled: bool = False


class Cancels:
    """Drives a `SessionCore` without compaction. Raises AssertionError for whatever is wrong."""

    def __init__(self, core: Any, seed: int, vocab_size: int, longest: int) -> None:
        """A session of more than `longest` tokens makes room for a new one."""
        self.core, self.rng = core, random.Random(seed)
        self.vocab_size, self.longest = vocab_size, longest
        self.counts: Counter[str] = Counter()
        self.sessions: dict[str, Plain] = {}
        self.seq = self.num_opened = 0

    def run(self, goal: int) -> None:
        """Until so many turns were cut off; then until all works have ended."""
        while self.counts["cancelled"] < goal:
            for session in list(self.sessions.values()):
                self.act(session)
            while sum(name.startswith("c") for name in self.sessions) < NUM_CANCELLED:
                self.open("c", 2 * W + self.rng.randint(1, W))
            while sum(name.startswith("d") for name in self.sessions) < NUM_ANSWERING:
                self.open("d", 2 * W + self.rng.randint(1, W))
            if "a" not in self.sessions:
                self.open("", 2 * W, "a")
            self.step()
        while any(session.work for session in self.sessions.values()):
            self.step()

    def act(self, session: Plain) -> None:
        rng = self.rng
        if session.work is None:
            if session.name != "a" and len(session.tokens) > self.longest:
                del self.sessions[session.name]
                self.core.end(session.name, 0)
            elif session.name == "a":  # its tokens do not depend on what it answers
                self.submit(session, self.text(rng.randint(1, 6)), 1)
            elif session.name.startswith("d"):
                self.submit(session, [*session.owed, *self.text(rng.randint(1, 30))], MAX_TOKENS)
            elif rng.random() < 0.3:
                chunk = self.text(rng.choice((1, 1, 20, 50, 150, 300)))
                self.submit(session, [*session.owed, *chunk], rng.choice((0, 1, 2, MAX_TOKENS, MAX_TOKENS)))
        elif session.name.startswith("c") and not session.is_cancelled and rng.random() < 0.1:
            session.is_cancelled = True
            self.core.cancel(session.name, 0)

    def open(self, kind: str, size: int, name: str = "") -> None:
        self.num_opened += 1
        session = Plain(name or f"{kind}{self.num_opened}")
        self.sessions[session.name] = session
        self.submit(session, self.text(size), 0)

    def submit(self, session: Plain, tokens: list[int], max_tokens: int) -> None:
        self.seq += 1
        session.work = Work(
            session.name, 0, self.seq, tuple(tokens), num_head_tokens=SINKS, max_tokens=max_tokens
        )
        session.answer, session.is_cancelled = [], False
        self.core.submit(session.work)

    def step(self) -> None:
        self.core.step()
        for result in self.core.take_results():
            session = self.sessions[result.session_id]
            assert session.work is not None and result.seq == session.work.seq, (result, session.work)
            session.answer += result.token_ids
            if result.finish is not None:
                self.finish(session, session.work, result)

    def finish(self, session: Plain, work: Work, result: Result) -> None:
        assert result.finish is not Finish.REFUSED, result.error
        number = len(session.answer)
        if result.finish is Finish.CANCELLED:
            assert session.is_cancelled
            state = "while it answered" if number else "before its answer"
            self.counts.update(["cancelled", f"cancelled {state}"])
        else:
            assert number == work.max_tokens and result.finish is (Finish.LENGTH if number else Finish.FED)
        session.tokens += [*work.token_ids, *session.answer[:-1]]
        assert result.num_kv_tokens == len(session.tokens), (result, len(session.tokens))
        session.owed, session.work = tuple(session.answer[-1:]), None

    def text(self, size: int) -> list[int]:
        return [self.rng.randrange(3, self.vocab_size) for _ in range(size)]


def cancels(recipe: EngineRecipe, device: str, eager: bool, goal: int | None = None) -> dict[str, Any]:
    import torch

    from tests.engine.vllm.stepper import Stepper

    # The CPU's mask is rounded to the steps that a chunk is taken in by: there nothing may leave the window.
    window = W if device == "cuda" else 2048
    core = make_core(recipe, device, eager, compaction_slack_tokens=0, window_tokens=window)
    watch = LogitsWatch(core)
    game = Cancels(core, 1, VOCAB_SIZE, longest=3000)
    game.run(goal or (200 if device == "cuda" else 20))
    watch.close()
    steady = game.sessions["a"]
    alone = replay(core, "alone", steady.tokens)
    ends = [end for end in sorted(watch.logits) if end in alone and end > 2 * W]

    cut_off = [session for name, session in game.sessions.items() if name.startswith("c")][:NUM_COMPARED]
    probe = game.text(10)
    went_on, again, changed = [], [], []
    for session in cut_off:
        resumed = LogitsWatch(core, session.name)
        game.submit(session, [*session.owed, *probe], 1)
        while session.work is not None:
            game.step()
        resumed.close()
        went_on.append(resumed.logits[len(session.tokens)])
        again.append(replay(core, f"again{session.name}", session.tokens)[len(session.tokens)])
        other = list(session.tokens)
        other[-len(probe) - 3] = (other[-len(probe) - 3] + 1) % VOCAB_SIZE
        changed.append(replay(core, f"changed{session.name}", other)[len(other)])
    for name in game.sessions:
        core.end(name, 0)
    while core.has_work():
        core.step()
    Stepper(core).check_empty()
    core.shutdown()
    row: dict[str, Any] = dict(game.counts) | {
        "compared": len(ends),
        "error_of_the_undisturbed": relative_error(
            torch.stack([watch.logits[end] for end in ends]), torch.stack([alone[end] for end in ends])
        ),
        "error_of_the_cancelled": relative_error(torch.stack(went_on), torch.stack(again)),
        "error_if_one_token_differs": relative_error(torch.stack(changed), torch.stack(again)),
    }
    assert row["cancelled while it answered"] > row["cancelled"] / 4 and row["compared"] > 10, row
    worst = max(row["error_of_the_undisturbed"], row["error_of_the_cancelled"])
    assert worst < MAX_ERROR and row["error_if_one_token_differs"] > 2 * worst, row
    return row


def replay(core: Any, name: str, tokens: list[int]) -> dict[int, Any]:
    """A new session's logits after the same tokens: a long chunk, then the last hundred one by one."""
    watch = LogitsWatch(core, name)
    head = max(1, len(tokens) - 100)
    fed = [tokens[:head], *([token] for token in tokens[head:])]
    for seq, chunk in enumerate(fed):
        core.submit(Work(name, 0, seq, tuple(chunk), num_head_tokens=SINKS))
        while not [result for result in core.take_results() if result.finish is Finish.FED]:
            core.step()
    core.end(name, 0)
    watch.close()
    return watch.logits
