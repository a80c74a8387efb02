"""The `metronome` command. What is heavy (torch, vllm, FastAPI) is imported inside the verb that needs it."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from app.load_cli import load as load_verb
from app.options import Option, load, options
from app.settings import SettingsError

app = typer.Typer(
    name="metronome",
    help="WebSocket server for real-time voice with audio-in language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def serve(**values: Any) -> None:
    """Serve sessions. Every option is also an environment variable; an option given here wins."""
    given = {option.path: values[_parameter_name(option)] for option in _flags}
    try:
        settings = load({path: value for path, value in given.items() if value is not None})
    except SettingsError as error:
        for line in str(error).splitlines():
            print(f"metronome: {line}", file=sys.stderr)
        raise typer.Exit(2) from None
    from app.server import run

    run(settings)


@app.command()
def prepare() -> None:
    """Fetch METRONOME_MODEL into METRONOME_CACHE_DIR, so that a start needs no network."""
    from engine.models import load_family, load_vad_file
    from engine.models.prepare import PrepareError, progress_bar

    settings = load()
    cache_dir = settings.cache_dir.expanduser().absolute()
    checkpoint = None
    try:
        with progress_bar() as report:
            load_vad_file(cache_dir, report)
            if settings.model != "null":
                checkpoint = load_family(settings.model, cache_dir, report).info.checkpoint
    except (PrepareError, ValueError) as error:
        print(f"metronome: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    print(f"{settings.model} is ready" + (f": {checkpoint}" if checkpoint else f" in {cache_dir}"))


def _parameter_name(option: Option) -> str:
    return "_".join(option.path)


def _parameter(option: Option) -> inspect.Parameter:
    """Options reach `load` as texts, so that one place judges them, wherever they come from."""
    text = f"{option.info.description}. ({option.range}; default {option.default}; {option.env})"
    flag = f"{option.flag}/--no-{option.flag[2:]}" if option.is_bool else option.flag
    kind: Any = bool if option.is_bool else str
    metavar = None if option.is_bool else option.path[-1].upper()
    return inspect.Parameter(
        _parameter_name(option),
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, typer.Option(flag, help=text, metavar=metavar, show_default=False)],
    )


# Typer reads a function's signature; ours is made from the settings, so that no option is written down twice.
_flags = [option for option in options() if not option.is_secret]
_variables = "\n\n".join(f"{o.env}: {o.info.description}." for o in options() if o.is_secret)
_parameters = [_parameter(option) for option in _flags]
serve.__signature__ = inspect.Signature(_parameters)  # pyright: ignore[reportFunctionMemberAccess]
serve.__annotations__ = {parameter.name: parameter.annotation for parameter in _parameters}
app.command(epilog=f"Only in the environment: {_variables}")(serve)


@app.command()
def talk(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Recordings, one turn each, in one session.", show_default=False),
    ] = None,
    mic: Annotated[bool, typer.Option("--mic", help="Talk through the microphone until Ctrl-C.")] = False,
    url: Annotated[
        str, typer.Option(help="The server's endpoint.", envvar="METRONOME_TALK_URL")
    ] = "ws://127.0.0.1:8000/v1/stream",
    turn: Annotated[
        str, typer.Option(help="Who ends a turn: server_vad or manual.", envvar="METRONOME_TALK_TURN")
    ] = "server_vad",
    instructions: Annotated[
        str | None,
        typer.Option(help="System instructions of the session.", envvar="METRONOME_TALK_INSTRUCTIONS"),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Tokens of one answer.", envvar="METRONOME_TALK_MAX_TOKENS", min=1)
    ] = None,
    wait_s: Annotated[
        float,
        typer.Option(help="Give up without an answer within so long.", envvar="METRONOME_TALK_WAIT_S", min=1),
    ] = 60.0,
    voice: Annotated[
        bool, typer.Option("--voice", help="Ask for spoken answers; they are not played.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the spoken answers to this WAV file (implies --voice).", show_default=False),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print tick figures too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each event as one JSON line.")] = False,
) -> None:
    """Speak recordings (or the microphone) to a server at real time and print what comes back.

    Exit status: 0 answered, 1 error, 3 refused at capacity.
    """
    from app import talk as talking

    if turn not in talking.TURNS:
        raise typer.BadParameter(f"must be server_vad or manual; got {turn!r}", param_hint="--turn")
    if bool(files) == mic:
        raise typer.BadParameter("give one or more FILES, or --mic", param_hint="FILES")
    is_aloud = voice or out is not None
    options = talking.TalkOptions(url, turn, instructions, max_tokens, wait_s, is_aloud, out)
    printer = talking.JsonPrinter() if as_json else talking.TextPrinter(verbose=verbose)
    raise typer.Exit(talking.main(options, list(files or []), printer))


app.command("load")(load_verb)


def main() -> None:
    app()
