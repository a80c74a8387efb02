"""Host memory of the arrays that vLLM sizes by max_model_len, with compaction and without (CPU, runner V1).

    python -m bench.length_arrays [--sessions 257] [--positions 32768]

A tiny model: the arrays depend on the number of sessions and positions only.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.vllm.environment import prepare_process, repair_torch_companions
from engine.vllm.settings import VllmSettings


def array_bytes(root: Any, depth: int = 4) -> int:
    """Of all distinct arrays and tensors that hang on an object."""
    import torch

    seen: set[int] = set()
    total, level = 0, [root]
    for _ in range(depth):
        below: list[Any] = []
        for item in level:
            if isinstance(item, (np.ndarray, torch.Tensor)):
                array = item.numpy() if isinstance(item, torch.Tensor) else item
                address = array.__array_interface__["data"][0]
                total += 0 if address in seen else array.nbytes
                seen.add(address)
            elif isinstance(item, (list, tuple)):
                below += item
            elif hasattr(item, "__dict__"):
                below += vars(item).values()
        level = below
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--sessions", type=int, default=257)
    parser.add_argument("--positions", type=int, default=32_768)
    options = parser.parse_args()
    prepare_process("cpu")
    repair_torch_companions()
    from engine.vllm.loading import load
    from tests.support import tiny_llama

    with tempfile.TemporaryDirectory() as directory:
        recipe = tiny_llama.build(Path(directory), max_position_embeddings=options.positions)
        recipe = replace(recipe, max_session_tokens=options.positions)
        for slack in (0, 512):
            settings = VllmSettings(
                max_sessions=options.sessions, kv_cache_bytes=64 << 20, compaction_slack_tokens=slack
            )
            core: Any = load(recipe, settings)
            runner = core.model_executor.driver_worker.worker.model_runner
            row = {
                "sessions": options.sessions,
                "compaction": bool(slack),
                "max_model_len": core.scheduler.max_model_len,
                "arrays_mib": round(array_bytes(runner.input_batch) / 2**20, 1),
            }
            print(json.dumps(row), flush=True)
            core.shutdown()


if __name__ == "__main__":
    main()
