"""Commands on their way to the engine's thread: merged, ordered, never more than sessions."""

from __future__ import annotations

import queue
import threading

from engine.types import Finish, Result, Work
from engine.vllm.inbox import Inbox


def work(session: str, seq: int, generation: int = 0) -> Work:
    return Work(session, generation, seq, (1,))


def test_letters_keep_the_order_in_which_sessions_first_asked():
    inbox = Inbox()
    inbox.submit([work("b", 1), work("a", 2)])
    inbox.cancel(("c", 0))
    letters = inbox.take(block=False)
    assert letters is not None
    assert [letter.key[0] for letter in letters] == ["b", "a", "c"]
    assert inbox.take(block=False) == []


def test_a_flood_of_one_session_stays_one_letter():
    inbox = Inbox()
    for seq in range(1000):
        inbox.submit([work("a", seq)])
        inbox.cancel(("a", 0))
    (letter,) = inbox.take(block=False) or []
    assert letter.work == work("a", 0)
    assert letter.surplus == work("a", 999)  # which the engine refuses
    assert letter.cancel_work


def test_a_cancel_means_what_ran_when_it_came():
    inbox = Inbox()
    inbox.cancel(("a", 0))
    inbox.submit([work("a", 1)])
    (letter,) = inbox.take(block=False) or []
    assert letter.cancel_running and not letter.cancel_work
    inbox.submit([work("a", 2)])
    inbox.cancel(("a", 0))
    (letter,) = inbox.take(block=False) or []
    assert letter.cancel_work and not letter.cancel_running


def test_an_end_takes_the_work_back():
    inbox = Inbox()
    inbox.submit([work("a", 1)])
    inbox.end(("a", 0))
    (letter,) = inbox.take(block=False) or []
    assert letter.end and letter.work is None


def test_results_of_ended_sessions_are_dropped():
    inbox = Inbox()
    inbox.end(("a", 1))
    results = [
        Result(session, generation, 0, (), Finish.FED, 1)
        for session, generation in (("a", 0), ("a", 1), ("b", 1))
    ]
    assert inbox.without_ended(results) == [results[0], results[2]]


def test_a_sleeping_reader_wakes_for_a_command_and_for_the_close():
    inbox = Inbox()
    taken: queue.Queue = queue.Queue()

    def read() -> None:
        while (letters := inbox.take(block=True)) is not None:
            taken.put(letters)
        taken.put(None)

    reader = threading.Thread(target=read)
    reader.start()
    inbox.submit([work("a", 1)])
    assert [letter.work for letter in taken.get(timeout=5)] == [work("a", 1)]
    inbox.close()
    assert taken.get(timeout=5) is None
    reader.join(5)
    inbox.submit([work("a", 2)])
    assert inbox.take(block=True) is None
