"""An engine is started, closed and started again in one process: what stays of the device's memory?

    python -m bench.windowed_engine_rebuild --out FILE.json [--device cpu]

Qwen2.5-7B's widths, 8 layers, random weights, compiled, CUDA graphs: 5 GiB of weights and 2 GiB of KV cache.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.windowed_engine_gpu import QWEN2_5_7B, TINY, write_config
from engine.models.family import EngineRecipe
from engine.vllm.engine import VllmEngine
from engine.vllm.environment import prepare_process, repair_torch_companions
from engine.vllm.settings import VllmSettings

LIVES = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    options = parser.parse_args()
    prepare_process(options.device)
    repair_torch_companions()
    on_gpu = options.device == "cuda"
    shape = QWEN2_5_7B | {"num_hidden_layers": 8} if on_gpu else TINY
    settings = VllmSettings(
        device=options.device,
        max_sessions=32,
        max_batch_tokens=64,  # few graphs: a start is short
        kv_cache_bytes=2 << 30 if on_gpu else 1 << 26,
        gpu_memory_utilization=0.3,
        eager=False,
        max_sink_tokens=64,
        max_session_tokens=2048,
        compaction_slack_tokens=0,
    )
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        write_config(Path(directory) / "shape", shape)
        recipe = EngineRecipe(
            Path(directory) / "shape",
            4096,
            load_format="dummy",
            overrides={"skip_tokenizer_init": True},
        )
        for life in range(LIVES):
            started = time.perf_counter()
            engine = VllmEngine(recipe, settings)
            engine.start(lambda results: None, lambda failure: None)
            rows.append({"life": life, "start_s": round(time.perf_counter() - started, 1)})
            rows[-1] |= {f"{name}_running": value for name, value in memory(on_gpu).items()}
            engine.close()
            del engine
            gc.collect()
            rows[-1] |= {f"{name}_closed": value for name, value in memory(on_gpu).items()}
            print(rows[-1], flush=True)
            options.out.write_text(json.dumps({"part": "rebuild", "rows": rows}, indent=1) + "\n")


def memory(on_gpu: bool) -> dict[str, float]:
    """GiB that torch holds: in tensors, and in all (CUDA graphs and what is cached)."""
    import torch

    if not on_gpu:
        return {}
    torch.cuda.synchronize()
    return {
        "tensors_gib": round(torch.cuda.memory_allocated() / 2**30, 3),
        "reserved_gib": round(torch.cuda.memory_reserved() / 2**30, 3),
    }


if __name__ == "__main__":
    main()
