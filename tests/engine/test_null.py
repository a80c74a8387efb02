"""The null engine keeps the seam's promises: the core step by step, the thread by waiting for its results."""

import queue
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.engine import Engine, EngineError
from engine.models.null import CLOSE, OPEN, NullFamily, encode
from engine.null import DEFAULT_LIMITS, NullCore, NullEngine
from engine.types import Features, Finish, Hearing, Result, TurnMode, Work

WAIT_S = 30.0  # only ever reached by a bug


def work(text: str = "hi", *, session: str = "a", generation: int = 0, seq: int = 1, **rest: Any) -> Work:
    given: dict[str, Any] = {"token_ids": (OPEN, *encode(text), CLOSE), "max_tokens": 100}
    return Work(session, generation, seq, **(given | rest))


def run(core: NullCore, *works: Work) -> list[Result]:
    """All results until the core is idle."""
    for one in works:
        core.submit(one)
    results = []
    while core.has_work:
        results += core.step()
    return results


def said(results: list[Result]) -> str:
    return bytes(token for result in results for token in result.token_ids).decode()


def test_an_answer_echoes_the_turn_and_stops():
    core = NullCore(tokens_per_step=4)
    results = run(core, work("hello"))
    assert said(results) == "echo: hello"
    assert [r.finish for r in results] == [None, None, Finish.STOP]
    assert results[-1].num_kv_tokens == 7 + 11  # after a stop, everything said is in the cache
    assert results[0].num_kv_tokens == 7 + 3  # before, the last token is not


def test_taking_in_decodes_nothing():
    core = NullCore()
    results = run(core, work("hello", max_tokens=0))
    assert [(r.finish, r.token_ids, r.num_kv_tokens) for r in results] == [(Finish.FED, (), 7)]
    turn = run(core, work(seq=2, token_ids=encode(" you")))
    assert said(turn) == "echo: hello you"


def test_an_answer_cut_short_goes_on_where_it_was():
    core = NullCore(tokens_per_step=4)
    results = run(core, work("hello", max_tokens=5))
    assert results[-1].finish is Finish.LENGTH and results[-1].num_kv_tokens == 7 + 4
    last = results[-1].token_ids[-1]
    results += run(core, work(seq=2, token_ids=(last,), max_tokens=6))
    assert results[-1].finish is Finish.LENGTH and said(results) == "echo: hello"
    results += run(core, work(seq=3, token_ids=(results[-1].token_ids[-1],), max_tokens=6))
    assert results[-1].finish is Finish.STOP and said(results) == "echo: hello"
    assert results[-1].num_kv_tokens == 7 + 11


def test_cancel_ends_the_work_and_keeps_the_session():
    core = NullCore(tokens_per_step=2)
    core.submit(work("hello"))
    core.step()
    core.cancel("a", 0)
    assert [r.finish for r in core.step()] == [Finish.CANCELLED]
    core.cancel("a", 0)
    assert not core.has_work
    assert said(run(core, work("again", seq=2))) == "echo: again"


def test_end_frees_all_and_nothing_follows():
    core = NullCore()
    core.submit(work())
    core.step()
    core.end("a", 0)
    core.end("a", 0)
    core.end("nobody", 3)
    assert core.step() == [] and core.stats().num_sessions == core.stats().kv_blocks_used == 0
    assert run(core, work(seq=2))[0].finish is Finish.REFUSED  # that generation is over
    assert said(run(core, work(generation=1))) == "echo: hi"


FEATURES = (Features(offset=3, num_tokens=2, tensors={}),)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (work(token_ids=()), "at least one token"),
        (work(max_tokens=-1), "negative"),
        (work(features=FEATURES), "Features reach beyond"),
        (work(token_ids=(1,) * 8193), "beyond 8192"),
        (work(token_ids=(1,) * 8192, max_tokens=1), "beyond 8192"),
    ],
)
def test_what_cannot_run_is_refused_and_hurts_nobody_else(bad: Work, why: str):
    core = NullCore()
    results = run(core, work(session="b"), bad)
    refusal = next(r for r in results if r.session_id == "a")
    assert refusal.finish is Finish.REFUSED and why in (refusal.error or "")
    assert said([r for r in results if r.session_id == "b"]) == "echo: hi"
    assert core.stats().num_sessions == 1


def test_a_second_work_before_the_first_is_finished_is_refused():
    core = NullCore(tokens_per_step=1)
    core.submit(work())
    core.step()
    results = run(core, work(seq=2))
    assert [(r.seq, r.finish) for r in results] == [(2, Finish.REFUSED)]
    assert core.stats().num_sessions == 0


def test_growing_over_the_length_is_refused_where_it_happens():
    core = NullCore(replace(DEFAULT_LIMITS, max_session_tokens=20))
    assert run(core, work(max_tokens=0))[0].num_kv_tokens == 4
    assert run(core, work(seq=2, max_tokens=13))[0].finish is Finish.REFUSED
    assert run(core, work(generation=1, max_tokens=16))[-1].finish is Finish.STOP


def test_a_session_without_a_length_grows_past_any():
    core = NullCore(replace(DEFAULT_LIMITS, max_session_tokens=None))
    for seq in range(4):
        (result,) = run(core, work(seq=seq, token_ids=(1,) * 4000, max_tokens=0))
        assert (result.finish, result.num_kv_tokens) == (Finish.FED, 4000 * (seq + 1))


def test_what_is_beyond_the_kept_tokens_is_forgotten_before_the_work():
    core = NullCore(replace(DEFAULT_LIMITS, max_session_tokens=20))
    assert run(core, work(max_tokens=0))[0].num_kv_tokens == 4
    assert run(core, work(seq=2, max_tokens=5))[-1].num_kv_tokens == 8 + 4
    assert run(core, work(seq=3, keep_tokens=6, max_tokens=0))[0].num_kv_tokens == 6 + 4
    assert run(core, work(seq=4, keep_tokens=4, max_tokens=12))[-1].finish is Finish.STOP  # 4 + 4 + 12 fit


@pytest.mark.parametrize("keep", [-1, 2, 5, 99])
def test_a_session_goes_back_neither_into_its_head_nor_forward(keep: int):
    core = NullCore()
    assert run(core, work(max_tokens=0, num_head_tokens=3))[0].num_kv_tokens == 4
    (result,) = run(core, work(seq=2, keep_tokens=keep, num_head_tokens=3))
    assert result.finish is Finish.REFUSED and "4 tokens cannot go back to" in (result.error or "")


def test_one_session_too_many_is_refused():
    core = NullCore(replace(DEFAULT_LIMITS, max_sessions=2))
    results = run(core, *(work(session=name) for name in "abc"))
    assert [r.session_id for r in results if r.finish is Finish.REFUSED] == ["c"]
    core.end("a", 0)
    assert said(run(core, work(session="c", generation=1))) == "echo: hi"


def test_memory_of_the_ended_is_bounded():
    core = NullCore()
    for i in range(core.ENDED_KEPT + 100):
        core.submit(work(session=f"s{i}"))
        core.end(f"s{i}", 0)
    assert len(core._ended) == core.ENDED_KEPT and core.stats().num_sessions == 0


class Running:
    def __init__(self, **kwargs: Any) -> None:
        self.results: queue.Queue[Result] = queue.Queue()
        self.failures: queue.Queue[EngineError] = queue.Queue()
        self.engine = NullEngine(**kwargs)
        self.engine.start(self.on_results, self.failures.put)

    def on_results(self, batch: Sequence[Result]) -> None:
        for result in batch:
            self.results.put(result)

    def finish(self, session: str = "a") -> list[Result]:
        """This session's results up to its finish."""
        found = []
        while not found or found[-1].finish is None:
            result = self.results.get(timeout=WAIT_S)
            found += [result] if result.session_id == session else []
        return found


@pytest.fixture
def running() -> Iterator[Running]:
    it = Running()
    yield it
    it.engine.close()


def test_it_is_an_engine(running: Running):
    engine: Engine = running.engine
    assert engine.limits == DEFAULT_LIMITS
    engine.submit([work("on a thread")])
    assert said(running.finish()) == "echo: on a thread"
    assert engine.stats().num_sessions == 1 and engine.stats().num_steps >= 1


def test_results_may_be_answered_on_the_engines_thread():
    done: queue.Queue[Result] = queue.Queue()
    engine = NullEngine(tokens_per_step=100)

    def on_results(batch: Any) -> None:
        for result in batch:
            if result.seq == 1:
                engine.submit([work("second", seq=2)])
            else:
                done.put(result)

    engine.start(on_results, lambda failure: None)
    engine.submit([work("first")])
    assert said([done.get(timeout=WAIT_S)]) == "echo: second"
    engine.close()


def test_a_slow_step_lets_a_cancel_in():
    running = Running(step_s=3600.0)  # closing does not wait for it
    running.engine.submit([work()])
    running.engine.cancel("a", 0)
    running.engine.close()
    running.engine.close()
    assert running.results.empty()


def test_a_breakdown_is_told_once_and_then_all_is_quiet(running: Running):
    running.engine.break_down("the device is gone")
    assert "device is gone" in str(running.failures.get(timeout=WAIT_S))
    running.engine.submit([work()])
    running.engine.cancel("a", 0)
    running.engine.end("a", 0)
    running.engine.close()
    assert running.failures.empty() and running.results.empty()


def test_starting_twice_is_an_error(running: Running):
    with pytest.raises(EngineError, match="started before"):
        running.engine.start(lambda batch: None, lambda failure: None)


# the family


def hear(family: NullFamily, ear: Any, num_samples: int, is_final: bool):
    return family.hear([Hearing("a", ear, np.zeros(num_samples, np.float32), is_final)])[0]


def test_the_family_hears_lengths_and_starts_each_turn_anew():
    family = NullFamily()
    ear = family.new_ear()
    assert hear(family, ear, 16_000, False).token_ids == ()
    heard = hear(family, ear, 3_744, True)
    assert heard.transcript == "heard 1234 ms" and bytes(heard.token_ids).decode() == "heard 1234 ms"
    assert hear(family, ear, 0, True).token_ids == ()
    assert hear(family, ear, 160, True).transcript == "heard 10 ms"


def test_the_family_offers_every_mode_and_its_template_has_no_text():
    family = NullFamily()
    assert set(family.info.turn_modes) == set(TurnMode)
    mode = TurnMode.MANUAL
    template = (*family.open_turn(mode), *family.close_turn(mode), *family.close_answer(mode))
    detokenizer = family.detokenizer()
    assert detokenizer.push(template) == ""
    assert (
        detokenizer.push(family.head("be brief"))
        == "be brief"
        == detokenizer.push(family.instruct("be brief"))
    )


def test_the_detokenizer_holds_back_half_a_character():
    detokenizer = NullFamily().detokenizer()
    first, *rest = encode("é")
    assert (detokenizer.push([first]), detokenizer.push(rest), detokenizer.flush()) == ("", "é", "")
    assert (detokenizer.push([first]), detokenizer.flush()) == ("", "�")
