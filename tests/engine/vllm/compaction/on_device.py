"""Compaction on CUDA: V2's runner, asynchronous scheduling, CUDA graphs. Run it on the GPU machine:

    VLLM_USE_FLASHINFER_SAMPLER=0 python3 -m tests.engine.vllm.compaction.on_device [--only PART ...]
    python -m tests.engine.vllm.compaction.on_device --device cpu        a dry run of every line

logits   each step's last logits against Hugging Face's float32 model, cut and turned back the same way, over
         many compactions and steps back; bf16's own error is known from the steps before the first compaction
fp8      the same with an fp8 cache
chaos    works, cancels, ends and steps back at random moments: every count right, nothing left
cancels  200 cancels past the window without compaction: the others undisturbed, the cancelled go on rightly
pieces   works with audio, taken in piece by piece, against the same works uncut
long     32 sessions of different phases at max_model_len of about 2,048 pass 20,000 tokens each

One JSON line each; exit status 1 if anything failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.provenance import provenance
from engine.vllm.environment import prepare_process, repair_torch_companions
from tests.engine.vllm.compaction.on_device_cancels import cancels
from tests.engine.vllm.compaction.on_device_engine import save_model
from tests.engine.vllm.compaction.on_device_logits import logits
from tests.engine.vllm.compaction.on_device_pieces import pieces
from tests.engine.vllm.compaction.on_device_sessions import chaos, long

Part = Callable[..., dict[str, Any]]


def plan(device: str) -> list[tuple[str, Part, dict[str, Any]]]:
    """Name, function and keyword arguments, the shortest first."""
    eager = device == "cpu"
    parts: list[tuple[str, Part, dict[str, Any]]] = [
        ("chaos", chaos, {"eager": eager}),
        ("cancels", cancels, {"eager": eager}),
        ("pieces", pieces, {"eager": eager}),
        ("logits", logits, {"eager": True}),
    ]
    if device == "cuda":
        parts += [
            ("logits", logits, {"eager": False}),
            ("fp8", logits, {"eager": False, "kv_dtype": "fp8"}),
        ]
    return [*parts, ("long", long, {"eager": eager})]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=["logits", "fp8", "chaos", "cancels", "pieces", "long"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    faulthandler.register(signal.SIGTERM, chain=True)  # `timeout` shall tell where it hung
    prepare_process(options.device)
    repair_torch_companions()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        recipe = save_model(Path(directory) / "model")
        for name, part, arguments in plan(options.device):
            if options.only and name not in options.only:
                continue
            row: dict[str, Any] = {"part": name, **arguments}
            started = time.perf_counter()
            try:
                row |= part(recipe, options.device, **arguments)
            except Exception as error:  # one part's failure must not cost a GPU call's other results
                traceback.print_exc()
                row["failed"] = f"{type(error).__name__}: {error}"
            gc.collect()
            row["took_s"] = round(time.perf_counter() - started, 1)
            rows.append(row)
            print(json.dumps(row), flush=True)
            if options.out is not None:  # each time: what comes next may be killed
                result = provenance(options.device) | {"rows": rows}
                options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if any("failed" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
