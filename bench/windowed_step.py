"""An engine step on the CPU at batch 8: old windowed sessions against stock attention over as many tokens.

    python -m bench.windowed_step [--blocks 16 32] [--rounds 12] [--repeats 2]

SmolLM2 in several engines in one process, which take turns, so that a slow minute of the machine meets all.
The windowed sessions (W = 1,024, S = 16) are `--age` tokens old and hold about 1,050; the stock ones
(kv=unbounded, with vLLM's own block size and with ours) grow from below to above that while they are
measured. A step decodes one token for each of the 8 sessions. Writes windowed_step.json and .md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.engine_parked import check, cpu_name
from engine.types import Work
from engine.vllm.environment import prepare_process, repair_torch_companions

BATCH, WINDOW, SINKS = 8, 1024, 16
STEPS_PER_ROUND = 9  # the first takes the sessions up again and does not count
BAR = 1.15


@dataclass
class Contender:
    """One engine with its 8 sessions."""

    name: str
    core: Any
    num_tokens: int  # of each session when the measurement begins
    steps_ms: list[float] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)  # tokens a step's attention reads of a session
    generation: int = 0

    def begin(self) -> None:
        """New sessions, grown to their age."""
        for number in range(BATCH):
            self.core.end(f"s{number}", self.generation)
        self.generation += 1
        tokens = tuple((7 * i) % 40_000 + 100 for i in range(self.num_tokens))
        for number in range(BATCH):
            self._submit(number, tokens[number:], max_tokens=0)
        while self.core.has_work():
            self.core.step()
        check(self.core.take_results())

    def round(self) -> None:
        for number in range(BATCH):
            self._submit(number, (200 + number,), max_tokens=STEPS_PER_ROUND)
        for step in range(STEPS_PER_ROUND):
            started = time.perf_counter()
            self.core.step()
            if step:
                self.steps_ms.append(1e3 * (time.perf_counter() - started))
        results = self.core.take_results()
        check(results)
        kept = [resident(result.num_kv_tokens, self) for result in results]
        self.resident.append(round(statistics.mean(kept)))
        while self.core.has_work():
            self.core.step()

    def _submit(self, number: int, tokens: tuple[int, ...], max_tokens: int) -> None:
        work = Work(f"s{number}", self.generation, 0, tokens, num_head_tokens=SINKS, max_tokens=max_tokens)
        self.core.submit(work)


def resident(num_tokens: int, contender: Contender) -> int:
    """Tokens that a query behind `num_tokens` reads."""
    from engine.vllm.sink_window.layout import gap_blocks

    if contender.name.startswith("stock"):
        return num_tokens
    block_size = contender.core.limits.block_size_tokens
    first, last = gap_blocks(SINKS, num_tokens, WINDOW, block_size)
    return num_tokens - max(0, last - first) * block_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[16, 32], help="windowed block sizes")
    parser.add_argument("--rounds", type=int, default=12, help="of 8 measured steps, per repeat")
    parser.add_argument("--repeats", type=int, default=2, help="each with new sessions")
    parser.add_argument("--age", type=int, default=2000, help="tokens of a windowed session")
    parser.add_argument("--out", type=Path, default=Path("bench/results"))
    options = parser.parse_args()
    prepare_process("cpu")
    repair_torch_companions()
    contenders = start(options)
    for repeat in range(options.repeats):
        for contender in contenders:
            contender.begin()
        for number in range(options.rounds):
            order = contenders if (number + repeat) % 2 else contenders[::-1]
            for contender in order:
                contender.round()
    report(contenders, options)
    for contender in contenders:
        contender.core.shutdown()


def start(options: argparse.Namespace) -> list[Contender]:
    from engine.models import bundles
    from engine.models.family import EngineRecipe
    from engine.models.prepare import prepare
    from engine.vllm.core import SessionCore
    from engine.vllm.loading import load
    from engine.vllm.settings import VllmSettings

    cache_dir = Path(os.environ.get("METRONOME_CACHE_DIR", "~/.cache/metronome")).expanduser()
    recipe = EngineRecipe(prepare(bundles.SMOLLM2, cache_dir), 8192)

    def engine(**changes: Any) -> SessionCore:
        settings = VllmSettings(
            max_sessions=BATCH + 1, kv_cache_bytes=1 << 30, window_tokens=WINDOW, **changes
        )
        return SessionCore(load(recipe, settings), None)

    grown = options.rounds * STEPS_PER_ROUND
    around = SINKS + WINDOW + 8 - grown // 2
    found = []
    for name, block_size in (("stock, its own blocks of 128", None), ("stock, blocks of 16", 16)):
        core = engine(kv="unbounded", block_size_tokens=block_size, max_session_tokens=1535)
        found.append(Contender(name, core, around))
    for block_size in options.blocks:
        core = engine(block_size_tokens=block_size, max_session_tokens=options.age + 2 * grown)
        found.append(Contender(f"windowed, blocks of {block_size}", core, options.age))
    return found


def report(contenders: list[Contender], options: argparse.Namespace) -> None:
    from engine.vllm.sink_window.layout import max_blocks

    stock_ms = statistics.median(contenders[0].steps_ms)
    rows = []
    for contender in contenders:
        deciles = statistics.quantiles(contender.steps_ms, n=10)
        block_size = contender.core.limits.block_size_tokens
        rows.append(
            {
                "engine": contender.name,
                "block_size": block_size,
                "resident_tokens": [min(contender.resident), max(contender.resident)],
                "step_ms": {
                    "p10": round(deciles[0], 2),
                    "p50": round(deciles[4], 2),
                    "p90": round(deciles[8], 2),
                },
                "ratio": round(deciles[4] / stock_ms, 3),
                "steps": len(contender.steps_ms),
                "session_tokens": max_blocks(256, WINDOW, 256, 8192, block_size) * block_size,
            }
        )
    load = os.getloadavg()
    result = {
        "what": f"ms of an engine step on the CPU, batch {BATCH}, SmolLM2-135M bf16, W {WINDOW}, S {SINKS}",
        "machine": cpu_name(),
        "threads": os.environ["OMP_NUM_THREADS"],
        "load_average": [round(value, 2) for value in load],
        "age_tokens": options.age,
        "bar": BAR,
        "rows": rows,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "windowed_step.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / "windowed_step.md").write_text(table(result))
    print(table(result))


def table(result: dict[str, Any]) -> str:
    lines = [
        "# Engine step on the CPU: windowed against stock",
        "",
        f"{result['what']}; {result['machine']}, {result['threads']} threads; windowed sessions are "
        f"{result['age_tokens']} tokens old. Median (10th to 90th percentile) of the steps of engines taking "
        f"turns in one process; bar {result['bar']}. Session: most KV tokens one can hold, at the defaults.",
        "",
        "| engine | tokens read per session | step ms | times stock | session |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        step, (low, high) = row["step_ms"], row["resident_tokens"]
        session = "8,192" if row["engine"].startswith("stock") else f"{row['session_tokens']:,}"
        lines.append(
            f"| {row['engine']} | {low:,} to {high:,} | {step['p50']} ({step['p10']} to {step['p90']}) "
            f"| {row['ratio']} | {session} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
