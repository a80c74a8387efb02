import json
import logging
import sys

import pytest

from app.logs import formatter
from tests.support.serving import serving
from tests.support.stage import pcm


def record(**extra: str) -> logging.LogRecord:
    try:
        raise ValueError("a\nb")
    except ValueError:
        info = sys.exc_info()
    made = logging.makeLogRecord(
        {"name": "app.x", "levelname": "ERROR", "msg": "lost %s", "args": ("é\n",), "exc_info": info}
    )
    made.__dict__.update(extra)
    return made


def test_json_is_one_line_with_what_was_given():
    line = formatter("json").format(record(session="s1"))
    assert "\n" not in line
    data = json.loads(line)
    assert (data["level"], data["logger"], data["message"], data["session"]) == (
        "ERROR",
        "app.x",
        "lost é\n",
        "s1",
    )
    assert "ValueError" in data["exc_info"]


def test_text_is_for_reading():
    assert "ERROR app.x: lost é" in formatter("text").format(record())


@pytest.mark.parametrize("is_asked", [False, True])
async def test_words_are_written_down_only_where_that_is_asked_for(
    is_asked: bool, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG)
    async with serving(log_words=is_asked) as server, server.client(turn="manual") as client:
        await client.audio(pcm(1.0))
        await client.say(type="input.commit")
        await client.until("response.done")
    ours = [record.getMessage() for record in caplog.records if record.name.startswith(("app", "engine"))]
    told = [message for message in ours if "heard 1000 ms" in message]
    assert len(told) == (2 if is_asked else 0)
    if is_asked:
        assert told[0].endswith("heard: 'heard 1000 ms'")
        assert told[1].endswith("said (stop): 'echo: heard 1000 ms'")
