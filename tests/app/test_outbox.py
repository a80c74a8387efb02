"""What waits for a client: bounded in messages and in sound, and emptied of what was interrupted."""

from __future__ import annotations

import pytest

from app.outbox import Outbox
from engine.errors import SlowReader
from engine.events import Pong, ResponseAudio, ResponseAudioDone, ResponseFlush
from engine.outputs import Close, Sound


def sound(response_id: str = "r1", num_bytes: int = 100) -> Sound:
    event = ResponseAudio(response_id=response_id, text="", duration_ms=1, num_bytes=num_bytes)
    return Sound(event, bytes(num_bytes))


async def drain(outbox: Outbox) -> list:
    outbox.put(Close(SlowReader("end")))
    items = []
    while not items or not isinstance(items[-1], Close):
        items.append(await outbox.get())
    return items


async def test_a_flush_takes_back_the_sound_of_its_answer_only_and_overtakes_nothing_else():
    outbox = Outbox()
    done = ResponseAudioDone(response_id="r1", duration_ms=2)
    for item in (Pong(), sound("r1"), sound("r2"), sound("r1"), done, ResponseFlush(response_id="r1")):
        outbox.put(item)
    pong, other, flush, _ = await drain(outbox)
    assert isinstance(pong, Pong) and isinstance(flush, ResponseFlush)
    assert other.event.response_id == "r2"


@pytest.mark.parametrize(("limit", "limit_bytes"), [(3, 1 << 20), (100, 300)])
async def test_a_client_that_does_not_read_is_given_up(limit: int, limit_bytes: int):
    outbox = Outbox(limit, limit_bytes)
    for _ in range(3):
        outbox.put(sound())
    assert not outbox.is_closed
    outbox.put(sound())
    assert outbox.is_closed
    item = await outbox.get()
    assert isinstance(item, Close) and isinstance(item.error, SlowReader)
    assert "3 messages" in str(item.error)


async def test_sound_that_was_read_or_flushed_makes_room():
    outbox = Outbox(limit_bytes=300)
    for _ in range(5):
        outbox.put(sound(num_bytes=300))
        await outbox.get()
    for i in range(5):
        outbox.put(sound(f"r{i}", 300))
        outbox.put(ResponseFlush(response_id=f"r{i}"))
    assert not outbox.is_closed
