"""The command line of `metronome load`. Nothing heavy is imported before it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from app.load_plan import Arrival, Lengths, LoadOptions, Turn

BUNDLED = Path(__file__).parents[1] / "engine" / "audio" / "probe.flac"  # one sentence, public domain


def _option(name: str, help: str, least: float | None = None, most: float | None = None) -> Any:
    """With its variable, and its range in the help and in the error (typer names the broken bound only)."""
    variable = f"METRONOME_LOAD_{name}"
    if least is None or most is None:
        return typer.Option(help=help, envvar=variable)

    def check(value: float | None) -> float | None:
        if value is not None and not least <= value <= most:
            raise typer.BadParameter(f"must be {least:g} to {most:g}; got {value:g}")
        return value

    return typer.Option(help=f"{help} ({least:g} to {most:g})", envvar=variable, callback=check)


def load(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Recordings that the callers speak; none: a bundled sentence.", show_default=False
        ),
    ] = None,
    url: Annotated[str, _option("URL", "The server's endpoint.")] = "ws://127.0.0.1:8000/v1/stream",
    key: Annotated[str | None, _option("KEY", "API key; the variable keeps it out of process lists.")] = None,
    clients: Annotated[int, _option("CLIENTS", "Callers in all.", 1, 100_000)] = 8,
    duration_s: Annotated[float, _option("DURATION_S", "All ends after so long.", 1, 604_800)] = 60.0,
    turn: Annotated[Turn, _option("TURN", "Who ends a turn.")] = "server_vad",
    arrival: Annotated[
        Arrival, _option("ARRIVAL", "Evenly, at random, all at once, or in steps.")
    ] = "steady",
    per_s: Annotated[
        float, _option("PER_S", "Callers a second, where steady or poisson.", 0.001, 10_000)
    ] = 2.0,
    step_clients: Annotated[int, _option("STEP_CLIENTS", "Callers of one step.", 1, 100_000)] = 4,
    step_s: Annotated[float, _option("STEP_S", "Seconds from step to step.", 0.1, 86_400)] = 10.0,
    session_s: Annotated[
        float | None,
        _option("SESSION_S", "Mean length of a session; none: until the end.", 0.1, 604_800),
    ] = None,
    lengths: Annotated[Lengths, _option("LENGTHS", "How sessions' lengths vary.")] = "exponential",
    repeat: Annotated[
        bool, _option("REPEAT", "Call again after a session, or when a refusal's retry_after_ms is over.")
    ] = False,
    voice: Annotated[
        bool, _option("VOICE", "Ask for spoken answers, and wait until they would have been played.")
    ] = False,
    pause_s: Annotated[
        float, _option("PAUSE_S", "Mean pause between an answer and the next turn.", 0.1, 3600)
    ] = 2.0,
    wait_s: Annotated[
        float, _option("WAIT_S", "A turn counts as unanswered after so long.", 0.1, 3600)
    ] = 30.0,
    vanish: Annotated[
        float, _option("VANISH", "Part of the callers whose connection is cut midway.", 0, 1)
    ] = 0.0,
    slow: Annotated[
        float, _option("SLOW", "Part of the callers that hardly read what they are sent.", 0, 1)
    ] = 0.0,
    processes: Annotated[
        int | None,
        _option("PROCESSES", "Client processes; none: one for 100 callers, up to the cores.", 1, 1024),
    ] = None,
    seed: Annotated[int, _option("SEED", "The same seed makes the same calls.", 0, 999_999)] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all figures here.", envvar="METRONOME_LOAD_JSON")
    ] = None,
) -> None:
    """Many callers over real WebSockets, speaking recordings in real time; shows what they were given.

    Exit status: 0 done, 1 no session could be opened, or a file is wrong.
    """
    if vanish + slow > 1:
        raise typer.BadParameter(f"--vanish and --slow together must be 0 to 1; got {vanish + slow:g}")
    options = LoadOptions(
        url=url, files=tuple(files or [BUNDLED]), clients=clients, duration_s=duration_s, turn=turn,
        arrival=arrival, per_s=per_s, step_clients=step_clients, step_s=step_s, session_s=session_s,
        lengths=lengths, pause_s=pause_s, wait_s=wait_s, vanish=vanish, slow=slow, repeat=repeat, voice=voice,
        processes=processes, key=key, seed=seed,
    )  # fmt: skip
    from app import load as loading
    from app.speaking import ClientError

    try:
        status = loading.main(options, json_file)
    except ClientError as error:
        print(f"metronome: {error}", file=sys.stderr)
        status = loading.FAILED
    raise typer.Exit(status)
