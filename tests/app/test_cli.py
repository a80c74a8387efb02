import subprocess
import sys
import types
from typing import Any

import pytest
from typer.testing import CliRunner

from app import cli, talk
from app.options import options
from app.settings import Settings

runner = CliRunner()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Settings that `serve` would run with."""
    got: list[Settings] = []
    server = types.ModuleType("app.server")
    server.run = got.append  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "app.server", server)
    return got


def test_help_shows_every_option_with_its_variable():
    result = runner.invoke(cli.app, ["serve", "--help"], env={"COLUMNS": "300"}, terminal_width=300)
    for option in options():
        assert option.env in result.output
        assert (option.flag + " " in result.output) is not option.is_secret  # a command line is no secret


def test_options_reach_the_server(served: list[Settings]):
    arguments = "serve --port 0 --model null --vad-silence-ms 700 --no-engine-eager --session-max-age-s none"
    result = runner.invoke(cli.app, arguments.split(), env={"METRONOME_HOST": "0.0.0.0"})
    assert result.exit_code == 0, result.output
    (settings,) = served
    assert (settings.host, settings.port, settings.model) == ("0.0.0.0", 0, "null")
    assert (settings.vad.silence_ms, settings.engine.eager) == (700, False)


def test_a_wrong_option_is_one_readable_line(served: list[Settings]):
    result = runner.invoke(cli.app, ["serve", "--port", "99999"])
    assert result.exit_code == 2 and not served
    assert result.stderr == "metronome: --port (METRONOME_PORT): must be 0 to 65535; got '99999'\n"


def test_an_unknown_option_is_refused(served: list[Settings]):
    assert runner.invoke(cli.app, ["serve", "--prot", "1"]).exit_code == 2
    assert runner.invoke(cli.app, ["serve"], env={"METRONOME_PROT": "1"}).exit_code == 2
    assert not served


def test_prepare_says_what_is_wrong_and_does_nothing_twice():
    result = runner.invoke(cli.app, ["prepare"], env={"METRONOME_MODEL": "no-such"})
    assert result.exit_code == 1 and "no model family is called 'no-such'" in result.stderr
    for _ in range(2):
        assert runner.invoke(cli.app, ["prepare"], env={"METRONOME_MODEL": "null"}).exit_code == 0


@pytest.mark.parametrize(
    "arguments", ["talk", "talk --mic a.wav", "talk a.wav --turn never", "talk --wait-s 0"]
)
def test_talk_says_what_it_needs(arguments: str):
    assert runner.invoke(cli.app, arguments.split()).exit_code == 2


def test_talk_gives_the_status_and_the_options(monkeypatch: pytest.MonkeyPatch):
    got: list[Any] = []
    monkeypatch.setattr(talk, "main", lambda *given: got.append(given) or 3)
    command = "talk a.wav b.wav --turn manual --instructions short --max-tokens 9 --json"
    result = runner.invoke(cli.app, command.split(), env={"METRONOME_TALK_URL": "ws://there/v1/stream"})
    assert result.exit_code == 3
    chosen, files, printer = got[0]
    assert chosen == talk.TalkOptions("ws://there/v1/stream", "manual", "short", 9, 60.0)
    assert [path.name for path in files] == ["a.wav", "b.wav"] and isinstance(printer, talk.JsonPrinter)


def test_the_command_line_and_the_null_parts_import_nothing_heavy():
    code = (
        "import sys, app.cli, app.talk, engine.null, engine.models.null; "
        "print([m for m in ('torch', 'vllm', 'fastapi', 'onnxruntime', 'ctranslate2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
