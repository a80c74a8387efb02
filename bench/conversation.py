"""End of speech to first text, the sessions that hold the budget, and memory: the default model on this CPU.

    python -m bench.conversation [--turns 6] [--out bench/results/conversation.json]
    python -m bench.conversation --voice --sessions 1 4 8 --out bench/results/spoken.json

With --voice answers are spoken, and each turn waits until the one before would have been played.
Server and clients share the machine. Each session speaks real recordings in real time with its own phase and
pauses between turns as people do; the silence that ends a turn (500 ms) is part of what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
from pathlib import Path

import numpy as np
import soundfile

from bench.server_process import ServerProcess, machine, served
from bench.speaker import Speaker

SPEECH = Path(__file__).parents[1] / "tests" / "data" / "speech"
NAMES = ("austen-0870.wav", "austen-0880.wav", "austen-0890.wav")  # 7.1, 3.0 and 5.3 s, one turn each
BUDGET_MS = 2000.0
TARGET_MS = 0.3 * BUDGET_MS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--turns", type=int, default=6, help="turns of each session")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 2, 4, 6, 8, 12])
    parser.add_argument("--voice", action="store_true", help="spoken answers: first sound, too")
    parser.add_argument("--note", default="", help="a sentence for the report: what else ran, say")
    parser.add_argument("--out", type=Path, default=Path("bench/results/conversation.json"))
    options = parser.parse_args()
    result: dict = {"machine": machine(), "start_s": None, "memory": {}, "rows": []}
    # The gate stands open, so that the machine's limit shows and not the gate's.
    most = str(max(options.sessions))
    with served("--aimd-initial", most, "--aimd-minimum", most, "--max-sessions", most) as server:
        result["start_s"], memory, rows = server.start_s, result["memory"], result["rows"]
        memory["ready_mib"] = server.resident_mib()
        for count in options.sessions:
            rows.append(asyncio.run(measure(server, count, options.turns, options.voice)))
            memory[f"after_{count}_sessions_mib"] = server.resident_mib()
            print(json.dumps(rows[-1]), flush=True)
            holding = [row["sessions"] for row in rows if row["holds_budget"]]
            result["sessions_that_hold_the_budget"] = max(holding, default=0)
            options.out.write_text(json.dumps(result, indent=1) + "\n")
            if options.voice:
                options.out.with_suffix(".md").write_text(report(result, options.note))
    print(table(result))


async def measure(server: ServerProcess, count: int, turns: int, is_aloud: bool) -> dict[str, object]:
    rng = random.Random(count)
    recordings = [soundfile.read(SPEECH / name, dtype="int16")[0] for name in NAMES]
    speakers = [Speaker(server.url, 16_000, is_aloud=is_aloud) for _ in range(count)]

    async def run(i: int, speaker: Speaker) -> None:
        await asyncio.sleep(rng.uniform(0.0, 6.0))
        said: list[np.ndarray] = [recordings[(i + turn) % len(recordings)] for turn in range(turns)]
        await speaker.run(said, pause_s=rng.uniform(1.0, 3.0))

    await asyncio.gather(*(run(i, speaker) for i, speaker in enumerate(speakers)))
    said = [t for s in speakers for t in s.turns]
    late = sorted(ms for s in speakers for ms in s.ticks_ms)
    p50, p99 = quantile(late, 0.5), quantile(late, 0.99)
    return {
        "sessions": count,
        "turns": len(said),
        "unanswered": sum(t.first_text_s is None for t in said),
        "first_text_ms": spread([t.first_text_s for t in said]),
        "first_sound_ms": spread([t.first_sound_s for t in said]),
        "clause_to_sound_ms": spread([t.clause_to_sound_s for t in said]),
        "lateness_ms": {"p50": p50, "p99": p99, "ticks": len(late)},
        "holds_budget": p50 < TARGET_MS and p99 < BUDGET_MS,
    }


def spread(seconds: list[float | None]) -> dict[str, int] | None:
    """In milliseconds; None where nothing came."""
    came = sorted(value for value in seconds if value is not None)
    if not came:
        return None
    return {
        "median": round(1000 * statistics.median(came)),
        "p10": round(1000 * quantile(came, 0.1)),
        "p90": round(1000 * quantile(came, 0.9)),
        "worst": round(1000 * came[-1]),
    }


def quantile(ordered: list[float], fraction: float) -> float:
    return ordered[int(fraction * (len(ordered) - 1))]


def table(result: dict) -> str:
    lines = [
        "| sessions | turns | end of speech to first text: median (p10-p90), ms | lateness p50 / p99, ms |",
        "|---|---|---|---|",
    ]
    for row in result["rows"]:
        text, late = row["first_text_ms"], row["lateness_ms"]
        lines.append(
            f"| {row['sessions']} | {row['turns']} | {text['median']} ({text['p10']}-{text['p90']}) "
            f"| {late['p50']:.0f} / {late['p99']:.0f} |"
        )
    return "\n".join(lines)


def report(result: dict, note: str) -> str:
    """Of a run with voice, for people."""
    about = result["machine"]
    lines = [
        "# Spoken answers: first text and first sound",
        "",
        f"`{about['command']}`, commit {about['commit']}, {about['cores']} cores of {about['cpu']}, server "
        f"and clients together, load average before the run {about['load_before']}. {note}".rstrip(),
        "",
        "Milliseconds, median (p10 to p90, worst). The first two columns run from the last sample of speech "
        "that was sent and hold the 500 ms of silence that end a turn.",
        "",
        "| sessions | turns | to first text | to first sound | first clause's text to its sound |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        cells = [
            f"{row[name]['median']} ({row[name]['p10']} to {row[name]['p90']}, {row[name]['worst']})"
            for name in ("first_text_ms", "first_sound_ms", "clause_to_sound_ms")
        ]
        lines.append(f"| {row['sessions']} | {row['turns']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
