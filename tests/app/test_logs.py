import json
import logging
import sys

from app.logs import formatter


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
