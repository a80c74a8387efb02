"""`metronome load`: its plan and its arithmetic alone, one caller on a real server, and the whole command."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner
from websockets.asyncio.server import ServerConnection, serve

from app import cli, load, load_client, load_report, playing
from app.load_client import Call, Listener, Speech
from app.load_figures import CPU_LIMIT, Figures, Histogram, doubts
from app.load_plan import Caller, LoadOptions, Manner, plan, session_length_s
from app.load_worker import read_speech
from app.options import load as load_settings
from app.speaking import ClientError
from tests.support.serving import serving
from tests.support.stage import pcm
from tests.support.voices import ToneVoice

SPEECH = Path(__file__).parents[1] / "data" / "speech" / "austen-0880.wav"


def options(url: str = "ws://unused/v1/stream", **changes: Any) -> LoadOptions:
    return LoadOptions(url=url, files=(SPEECH,), **changes)


# the plan


@pytest.mark.parametrize(
    ("changes", "times"),
    [
        ({"arrival": "steady", "per_s": 2.0}, [0.0, 0.5, 1.0, 1.5, 2.0]),
        ({"arrival": "burst"}, [0.0] * 5),
        ({"arrival": "step", "step_clients": 2, "step_s": 10.0}, [0.0, 0.0, 10.0, 10.0, 20.0]),
    ],
)
def test_callers_arrive_as_asked(changes: dict[str, Any], times: list[float]):
    assert [caller.arrives_s for caller in plan(options(clients=5, **changes))] == times


def test_random_arrivals_have_the_rate_and_the_seed_repeats_them():
    chosen = options(clients=2000, arrival="poisson", per_s=4.0)
    callers = plan(chosen)
    assert callers[-1].arrives_s == pytest.approx(500, rel=0.1)
    assert plan(chosen) == callers != plan(options(clients=2000, arrival="poisson", per_s=4.0, seed=1))


def test_manners_are_the_parts_that_were_asked_for():
    counts = Counter(c.manner for c in plan(options(clients=20, vanish=0.25, slow=0.1)))
    assert counts == {Manner.VANISHES: 5, Manner.READS_SLOWLY: 2, Manner.POLITE: 13}


@pytest.mark.parametrize("lengths", ["fixed", "uniform", "exponential"])
def test_session_lengths_have_the_mean(lengths: Any):
    rng, chosen = random.Random(1), options(session_s=20.0, lengths=lengths)
    drawn = [session_length_s(chosen, rng) for _ in range(4000)]
    assert sum(drawn) / len(drawn) == pytest.approx(20, rel=0.06)
    assert (len(set(drawn)) == 1) == (lengths == "fixed")
    assert session_length_s(options(), rng) == float("inf")


# the figures


def test_quantiles_are_at_most_five_percent_too_high():
    histogram = Histogram()
    for i in range(1, 1001):
        histogram.add(float(i))
    for fraction in (0.01, 0.5, 0.9, 0.99, 1.0):
        quantile = histogram.quantile_ms(fraction)
        assert quantile is not None and 1000 * fraction <= quantile <= 1050 * fraction
    assert histogram.quantile_ms(1.0) == histogram.max_ms == 1000
    assert Histogram().quantile_ms(0.5) is None and Histogram().as_dict()["max_ms"] is None


def test_processes_add_up():
    one, two = Figures(accepted=1, cpu_cores=[0.2]), Figures(accepted=2, cpu_cores=[0.4])
    one.refused["at_capacity"] += 1
    two.refused.update(at_capacity=2, draining=1)
    one.slip.add(1.0)
    two.slip.add(5.0)
    one.merge(two)
    assert one.accepted == 3 and one.cpu_cores == [0.2, 0.4]
    assert one.refused == {"at_capacity": 3, "draining": 1}
    assert (one.slip.count, one.slip.max_ms) == (2, 5.0)
    json.dumps(one.as_dict())


def test_a_client_that_is_late_itself_says_so():
    figures = Figures(cpu_cores=[CPU_LIMIT])
    for _ in range(100):
        figures.slip.add(1.0)
        figures.loop_delay.add(1.0)
    assert doubts(figures) == []
    for _ in range(3):
        figures.slip.add(50.0)
    (reason,) = doubts(figures)
    assert "chunks were sent 50 ms late" in reason
    figures.cpu_cores = [0.1, 0.99]
    assert "0.99 of its one core" in doubts(figures)[1]
    out = StringIO()
    Console(file=out, width=200).print(load_report.final(figures, {}))
    assert "not to be trusted: chunks were sent 50 ms late" in out.getvalue()


def listen(turn: str, *script: tuple[float, str | dict[str, Any]]) -> Figures:
    """Events at their times; the text "spoken" is the end of a recording."""
    figures = Figures()
    listener = Listener(figures, turn, 0.0)
    for at, item in script:
        if item == "spoken":
            listener.spoken(at)
        else:
            listener.on_event(item if isinstance(item, dict) else {"type": item}, at)
    return figures


CREATED = {"type": "session.created", "budget_ms": 2000}


def test_lateness_in_server_vad_runs_from_the_end_of_speech_that_the_server_told():
    text = {"type": "response.text.delta", "delta": "a"}
    figures = listen(
        "server_vad", (0.1, CREATED), (5.0, "spoken"), (5.5, "speech.stopped"), (5.6, text), (6.0, text)
    )
    assert (figures.connect.max_ms, figures.accepted) == (100, 1)
    assert figures.client_lateness.count == figures.first_text.count == 1
    assert figures.client_lateness.max_ms == pytest.approx(100)
    assert figures.first_text.max_ms == pytest.approx(600)


def test_lateness_in_manual_runs_from_the_commit():
    sound = {"type": "response.audio"}
    figures = listen(
        "manual", (0.1, CREATED), (5.0, "spoken"), (5.3, "response.text.delta"), (5.4, sound), (5.5, sound)
    )
    assert figures.client_lateness.max_ms == pytest.approx(300)
    assert figures.first_sound.count == 1 and figures.first_sound.max_ms == pytest.approx(400)


def test_lateness_in_continuous_is_what_a_tick_takes_over_the_budget():
    tick = {"type": "tick", "lateness_ms": 3.0}
    late = {"type": "tick", "lateness_ms": 2500.0}
    figures = listen("continuous", (0.0, CREATED), (2.0, tick), (4.0, tick), (8.5, late))
    assert figures.client_lateness.count == 2 and figures.client_lateness.max_ms == pytest.approx(2500)
    assert figures.server_lateness.max_ms == 2500 and figures.ticks_over_budget == 1


def test_an_error_before_the_session_is_a_refusal_and_after_it_an_error():
    refused = {"type": "error", "code": "at_capacity", "status": 503, "retry_after_ms": 4200}
    figures = Figures()
    listener = Listener(figures, "manual", 0.0)
    listener.on_event(refused, 0.0)
    assert listener.retry_s == 4.2 and figures.refused == {"at_capacity": 1} and not figures.errors
    figures = listen("manual", (0.0, CREATED), (1.0, {"type": "error", "code": "input_empty"}))
    assert figures.errors == {"input_empty": 1} and not figures.refused


# one caller on a real server


def speech() -> Speech:
    sound = pcm(0.2)
    return Speech(16_000, [[sound[i : i + 640] for i in range(0, len(sound), 640)]])


async def call(url: str, manner: Manner = Manner.POLITE, seconds: float = 3.0, **changes: Any) -> Figures:
    chosen = options(url, pause_s=0.1, turn="manual", **changes)
    figures, now = Figures(), time.monotonic()
    await Call(chosen, Caller(0, 0.0, manner, 7), speech(), figures).run(now, now + seconds)
    return figures


async def test_a_caller_takes_turns_and_leaves():
    async with serving() as server:
        figures = await call(f"ws://127.0.0.1:{server.port}/v1/stream")
        await server.until_empty()
    assert (figures.attempts, figures.accepted, figures.active) == (1, 1, 0)
    assert figures.turns >= 1 and figures.answers["stop"] >= 1 and figures.unanswered == 0
    assert figures.client_lateness.count == figures.first_text.count >= 1
    assert figures.bytes_out >= 6400 and figures.bytes_in > 0 and figures.slip.count >= 10
    assert figures.ended_by_client == {"left": 1} and not figures.closed_by_server


async def test_a_caller_with_a_voice_hears_the_answer_before_it_goes_on():
    async with serving(voice=ToneVoice()) as server:
        figures = await call(f"ws://127.0.0.1:{server.port}/v1/stream", voice=True, seconds=5.0)
        tally = server.service.conductor.tally()
    assert figures.first_sound.count >= 2 and figures.bytes_in > 48_000
    assert tally.interruptions == 0 and figures.unanswered == 0


async def test_a_caller_tells_what_was_played_right_after_a_flush(monkeypatch: pytest.MonkeyPatch):
    for module in (playing, load_client):
        monkeypatch.setattr(module, "REPORT_S", 1000.0)  # no other report comes
    told: list[dict[str, Any]] = []

    async def interrupt(socket: ServerConnection) -> None:
        async for message in socket:
            given = json.loads(message) if isinstance(message, str) else {}
            if given.get("type") == "input.commit":
                for kind in ("response.created", "response.audio", "response.flush"):
                    event = {"type": kind, "response_id": "r", "duration_ms": 60_000}
                    await socket.send(json.dumps(event))
            elif given.get("type") == "response.played":
                told.append(given)
                await socket.close()

    async with serve(interrupt, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        await call(f"ws://127.0.0.1:{port}/v1/stream", voice=True, seconds=10.0)
    (report,) = told
    assert report["response_id"] == "r" and 0 <= report["played_ms"] < 60_000


async def test_a_caller_that_vanishes_leaves_nothing_behind():
    async with serving() as server:
        figures = await call(f"ws://127.0.0.1:{server.port}/v1/stream", Manner.VANISHES)
        await server.until_empty()
    assert figures.ended_by_client == {"vanished": 1}


async def test_a_slow_reader_is_counted_like_any_other():
    async with serving() as server:
        figures = await call(f"ws://127.0.0.1:{server.port}/v1/stream", Manner.READS_SLOWLY)
        await server.until_empty()
    assert figures.accepted == 1 and figures.ended_by_client == {"left": 1}


async def test_a_refused_caller_is_counted_by_its_code():
    async with serving(max_sessions=1) as server, server.client() as other:
        await other.next()
        figures = await call(f"ws://127.0.0.1:{server.port}/v1/stream")
    assert figures.refused == {"at_capacity": 1} and figures.accepted == 0
    assert figures.closed_by_server == {"1013": 1} and not figures.failed


async def test_with_repeat_a_caller_calls_again():
    async with serving() as server:
        url = f"ws://127.0.0.1:{server.port}/v1/stream"
        figures = await call(url, seconds=4.0, repeat=True, session_s=0.3, lengths="fixed")
        await server.until_empty()
    assert figures.attempts == figures.accepted == figures.ended_by_client["left"] >= 2


async def test_a_server_that_is_not_there_is_a_failure_with_its_name():
    figures = await call("ws://127.0.0.1:9/v1/stream")
    assert figures.failed == {"ConnectionRefusedError": 1} and figures.active == 0


# the whole


async def test_processes_report_and_the_json_holds_both_sides(tmp_path: Path):
    out, target = StringIO(), tmp_path / "load.json"
    async with serving(max_sessions=2) as server:
        chosen = options(
            f"ws://127.0.0.1:{server.port}/v1/stream",
            clients=3,
            duration_s=6.0,
            arrival="burst",
            processes=2,
            turn="continuous",
            pause_s=0.1,
            key="secret",
        )
        console = Console(file=out, width=200)
        status = await asyncio.to_thread(load.main, chosen, target, console)
        await server.until_empty()
    result = json.loads(target.read_text())
    assert status == load.OK and "secret" not in target.read_text()
    figures = result["figures"]
    assert (figures["accepted"], figures["attempts"], figures["active"]) == (2, 3, 0)
    assert figures["refused"] == {"at_capacity": 1} and figures["closed_by_server"] == {"1013": 1}
    assert 1 <= len(figures["cpu_cores"]) <= 2 and figures["server_lateness"]["count"] >= 2
    assert result["server"]["admitted"] == 2 and result["server"]["misses"] == 0
    assert result["is_trusted"] == (not result["doubts"])
    assert "1 at_capacity" in out.getvalue()


def test_nobody_to_talk_to_is_status_1():
    console = Console(file=StringIO())
    chosen = options("ws://127.0.0.1:9/v1/stream", clients=1, duration_s=1.0)
    assert load.main(chosen, None, console) == load.FAILED


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("ws://h:1/v1/stream", "http://h:1/capacity"),
        ("wss://h/v1/realtime?x=1", "https://h/capacity"),
        ("ws://h/voice/v1/stream", "http://h/voice/capacity"),
    ],
)
def test_capacity_is_asked_of_the_same_server(url: str, wanted: str):
    assert load.capacity_url(url) == wanted


def test_what_cannot_work_is_told_before_anything_starts(tmp_path: Path):
    with pytest.raises(ClientError, match="must begin with ws://"):
        load.capacity_url("http://h/v1/stream")
    with pytest.raises(ClientError, match="there is no folder"):
        load.main(options(), tmp_path / "no" / "x.json")
    with pytest.raises(ClientError, match="cannot read"):
        read_speech(LoadOptions(url="ws://h", files=(tmp_path / "no.wav",)))


# the command line


def test_every_option_has_help_and_a_variable():
    result = CliRunner().invoke(cli.app, ["load", "--help"], env={"COLUMNS": "300"}, terminal_width=300)
    for name in ("url", "clients", "duration-s", "arrival", "vanish", "slow", "processes", "json"):
        assert f"--{name}" in result.output
        assert f"METRONOME_LOAD_{name.upper().replace('-', '_')}" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--clients 0", ("--clients", "1 to 100000", "got 0")),
        ("--vanish 1.5", ("--vanish", "0 to 1")),
        ("--vanish 0.7 --slow 0.7", ("--vanish and --slow together", "0 to 1", "1.4")),
        ("--turn never", ("--turn", "server_vad")),
    ],
)
def test_a_wrong_option_is_named_with_its_range(arguments: str, words: tuple[str, ...]):
    result = CliRunner().invoke(cli.app, ["load", *arguments.split()], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert all(word in result.output for word in words)


def test_options_and_variables_reach_the_load(monkeypatch: pytest.MonkeyPatch):
    got: list[Any] = []
    monkeypatch.setattr(load, "main", lambda *given: got.append(given) or 0)
    environment = {"METRONOME_LOAD_CLIENTS": "12", "METRONOME_LOAD_KEY": "k", "METRONOME_LOAD_JSON": "x.json"}
    arguments = "load a.wav --arrival step --step-clients 3 --repeat --session-s 9"
    result = CliRunner().invoke(cli.app, arguments.split(), env=environment)
    assert result.exit_code == 0, result.output
    chosen, json_file = got[0]
    assert (chosen.clients, chosen.key, json_file) == (12, "k", Path("x.json"))
    assert (chosen.arrival, chosen.step_clients, chosen.repeat, chosen.session_s) == ("step", 3, True, 9.0)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    load_settings()  # the server does not take them for misspelt options of its own
