"""What sockets, sessions and the clock around them cost: the null engine, 50 frames a second a session.

    python -m bench.front_end [--sessions 500 1000] [--seconds 20] [--repeats 3]

Clients are other processes (bench/frames.py) that stream real speech, 640 bytes every 20 ms, each in its own
phase. CPU is the server process's own, from /proc, so the clients' share of the machine is not in it. Manual
mode is the path from the socket to the queue; in server_vad mode the speech detector runs as well. Prints a
table, writes JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from bench.server_process import PORT, ServerProcess, machine, served

FRAMES_PER_S = 50
SESSIONS_A_CLIENT = 500
SETTLE_S = 2.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sessions", type=int, nargs="+", default=[500, 1000])
    parser.add_argument("--turns", nargs="+", default=["manual", "server_vad"])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("bench/results/front_end.json"))
    options = parser.parse_args()
    result = {"machine": machine(), "seconds": options.seconds, "rows": []}
    for turn in options.turns:
        for count in options.sessions:
            runs = [measure(count, options.seconds, turn) for _ in range(options.repeats)]
            result["rows"].append(summary(count, turn, runs))
            print(json.dumps(result["rows"][-1]), flush=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(report(result))


def measure(count: int, seconds: float, turn: str) -> dict[str, float]:
    room = str(count + 8)
    flags = ("--max-sessions", room, "--aimd-initial", room, "--aimd-minimum", room)
    with served("--model", "null", *flags) as server:
        clients = start_clients(count, seconds + 2 * SETTLE_S, turn)
        time.sleep(SETTLE_S)
        before, cpu_before, begin = scrape(server), cpu_s(server), time.monotonic()
        time.sleep(seconds)
        cpu = [late - early for late, early in zip(cpu_s(server), cpu_before, strict=True)]
        wall, after = time.monotonic() - begin, scrape(server)
        figures = [json.loads(client.communicate()[0]) for client in clients]
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    frames = count * FRAMES_PER_S * wall
    return {
        "cores": cpu[0] / wall,
        "loop_cores": cpu[1] / wall,
        "cpu_s_per_million_frames": 1e6 * cpu[0] / frames,
        "loop_delay_p50_ms": delay_ms(grown, 0.5),
        "loop_delay_p99_ms": delay_ms(grown, 0.99),
        "taken_in_fraction": grown["metronome_input_audio_seconds_total"] * FRAMES_PER_S / frames,
        "dropped_s": after["metronome_input_dropped_seconds_total"],
        "misses": grown["metronome_tick_misses_total"],
        "blocked_frames": sum(each["blocked"] for each in figures),
        "closed": sum(each["closed"] for each in figures),
        "client_slip_p99_ms": max(each["schedule_slip_p99_ms"] for each in figures),
        "client_cores": sum(each["client_cpu_s"] for each in figures) / (seconds + 2 * SETTLE_S),
    }


def start_clients(count: int, seconds: float, turn: str) -> list[subprocess.Popen[str]]:
    """Connect all, then let all begin."""
    clients = []
    for i, share in enumerate(shares(count)):
        arguments = [str(PORT), str(share), str(seconds), turn, str(i)]
        command = [sys.executable, "-m", "bench.frames", *arguments]
        clients.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    for client in clients:
        if client.stdout.readline() != "open\n":
            raise RuntimeError("the clients were not admitted")
    for client in clients:
        client.stdin.write("go\n")
        client.stdin.flush()
    return clients


def shares(count: int) -> list[int]:
    num = -(-count // SESSIONS_A_CLIENT)
    return [count // num + (i < count % num) for i in range(num)]


def cpu_s(server: ServerProcess) -> list[float]:
    """User and system seconds of the process, and of its first thread, which runs the event loop."""
    return [_stat_s(Path(f"/proc/{server.pid}{path}/stat")) for path in ("", f"/task/{server.pid}")]


def _stat_s(path: Path) -> float:
    fields = path.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def scrape(server: ServerProcess) -> dict[str, float]:
    """`/metrics`, by name and labels as they are written."""
    with urllib.request.urlopen(f"{server.http}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def delay_ms(grown: dict[str, float], fraction: float) -> float:
    """Upper bound of the bucket that holds the quantile of the event loop's delay."""
    name = re.compile(r'metronome_event_loop_delay_seconds_bucket\{le="(.+)"\}')
    buckets = [(float(found[1]), count) for key, count in grown.items() if (found := name.fullmatch(key))]
    total = grown["metronome_event_loop_delay_seconds_count"]
    return min(1000 * bound for bound, count in buckets if count >= fraction * total)


def summary(count: int, turn: str, runs: list[dict[str, float]]) -> dict[str, object]:
    """Median, least and most of each figure over the runs."""
    row: dict[str, object] = {"sessions": count, "turn": turn, "runs": len(runs)}
    for name in runs[0]:
        values = sorted(round(run[name], 4) for run in runs)
        row[name] = {"median": statistics.median(values), "min": values[0], "max": values[-1]}
    return row


def report(result: dict) -> str:
    about = result["machine"]
    runs, seconds = result["rows"][0]["runs"], result["seconds"]
    heads = (
        "sessions, mode", "server cores", "of them event loop", "CPU s / million frames",
        "loop delay p99, ms", "audio dropped, s", "misses", "clients' slip p99, ms",
    )  # fmt: skip
    lines = [
        f"Null engine, {FRAMES_PER_S} frames a second of 640 bytes a session. {about['cpu']},",
        f"{about['cores']} cores shared with the clients' processes, load {about['load_before']} before;",
        f"commit {about['commit']}; `{about['command']}`.",
        f"Medians of {runs} runs of {seconds:g} s (least to most).",
        "Loop delay: the upper bound of its histogram's bucket. Bar: 500 sessions under 0.5 core.",
        "",
        "| " + " | ".join(heads) + " |",
        "|---" * len(heads) + "|",
    ]
    for row in result["rows"]:
        names = (
            "cores",
            "loop_cores",
            "cpu_s_per_million_frames",
            "loop_delay_p99_ms",
            "dropped_s",
            "misses",
        )
        cells = [spread(row[name]) for name in (*names, "client_slip_p99_ms")]
        lines.append(f"| {row['sessions']}, {row['turn']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def spread(figure: dict[str, float]) -> str:
    def short(value: float) -> str:
        return f"{value:.2f}" if value < 10 else f"{value:.0f}"

    same = figure["min"] == figure["max"]
    return (
        short(figure["median"])
        if same
        else f"{short(figure['median'])} ({short(figure['min'])} to {short(figure['max'])})"
    )


if __name__ == "__main__":
    main()
