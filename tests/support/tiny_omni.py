"""Tiny Qwen-Omni checkpoints with random float32 weights: the whole model's names, a real tokenizer.

2 + 2 layers, narrow; what the code's paths depend on is true: 128 mel bins, blocks and windows of the
encoder, heads of 128 with M-RoPE's sections, the whole vocabulary; of Qwen3's experts 8, of which 2 are used.

    python -m tests.support.tiny_omni qwen2.5-omni-7b DIRECTORY
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from bench.families_checkpoint import write
from tests.support.npm import qwen_tokenizer

_WIDTH = 256
_AUDIO = {
    "d_model": 128,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 256,
    "output_dim": _WIDTH,
    "initializer_range": 0.1,
}
_TEXT = {
    "hidden_size": _WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,  # wide, so that greedy answers vary and ties do not happen
}
_VISION = {"depth": 1, "num_heads": 2, "out_hidden_size": _WIDTH}
_CHANGES: dict[str, dict[str, Any]] = {
    "2.5": {
        "audio_config": _AUDIO,
        "vision_config": _VISION | {"hidden_size": 64, "intermediate_size": 64, "fullatt_block_indexes": [0]},
        "text_config": _TEXT | {"intermediate_size": 512, "max_window_layers": 2},
    },
    "3": {
        "audio_config": _AUDIO | {"downsample_hidden_size": 16},
        "vision_config": _VISION
        | {"hidden_size": 64, "intermediate_size": 64, "deepstack_visual_indexes": [0]},
        "text_config": _TEXT | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    },
}


NAMES = ("qwen2.5-omni-7b", "qwen3-omni-30b-a3b")
CACHE_DIR = Path("~/.cache/metronome/tests").expanduser()
_UNUSED_S = 3600.0  # then a checkpoint of other code is removed


def cached(name: str) -> Path:
    """The checkpoint, built when the code that makes it has changed (300 MB, a few seconds).

    Several processes may call it at once: one builds, the others wait. Those of other code are removed, but
    not those that another working copy has just asked for.
    """
    sources = (Path(__file__), Path(sys.modules[write.__module__].__file__ or ""))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]
    directory = CACHE_DIR / f"tiny-{name}-{digest}"
    CACHE_DIR.mkdir(parents=True, exist_ok=True)
    with (CACHE_DIR / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        build(name, directory)
        directory.touch()  # used now
        for old in CACHE_DIR.glob(f"tiny-{name}-*"):
            if time.time() - old.stat().st_mtime > _UNUSED_S:
                shutil.rmtree(old, ignore_errors=True)
    return directory


def build(name: str, directory: Path) -> Path:
    """Write the checkpoint into `directory`, unless a complete one is there. Returns it."""
    from tokenizers import Tokenizer

    if (directory / "complete").exists():
        return directory
    tokenizer = Tokenizer.from_file(str(qwen_tokenizer(_generation(name))))
    write(name, directory, changes(name), tokenizer)
    _write_weights(directory)
    (directory / "complete").touch()
    return directory


def build_untokenized(name: str, directory: Path, dtype: str = "bfloat16") -> Path:
    """The same with one token a byte, where no real tokenizer can be had. All who read it begin with weights
    rounded to `dtype`."""
    import torch

    write(name, directory, {"thinker_config": _CHANGES[_generation(name)]})
    _write_weights(directory, getattr(torch, dtype))
    return directory


def changes(name: str) -> dict[str, Any]:
    """To the published config.json."""
    thinker = _CHANGES[_generation(name)] | {"torch_dtype": "float32"}
    return {"torch_dtype": "float32", "thinker_config": thinker}


def _generation(name: str) -> str:
    return "3" if name.startswith("qwen3") else "2.5"


def thinker(directory: Path) -> Any:
    """transformers' model of the checkpoint's thinker, with its weights."""
    from safetensors.torch import load_file

    weights = load_file(directory / "model.safetensors")
    model = _new_thinker(directory)
    model.load_state_dict(
        _fused({k.removeprefix("thinker."): v for k, v in weights.items() if "talker" not in k})
    )
    return model.eval()


def _new_thinker(directory: Path) -> Any:
    import torch
    import transformers
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory).thinker_config
    kind = "Qwen3OmniMoe" if "moe" in config.model_type else "Qwen2_5Omni"
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ThinkerForConditionalGeneration")(config).float()


def _write_weights(directory: Path, dtype: Any = None) -> None:
    import torch
    from safetensors.torch import save_file

    state = _published(_new_thinker(directory).state_dict())
    weights = {f"thinker.{name}": tensor.to(dtype).contiguous() for name, tensor in state.items()}
    weights["talker.model.norm.weight"] = torch.ones(8)  # published files hold the talker too
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _published(state: dict[str, Any]) -> dict[str, Any]:
    """Experts one by one, as files hold them; transformers keeps them in two tensors a layer."""
    result = {}
    for name, tensor in state.items():
        prefix, _, part = name.rpartition(".")
        if part == "gate_up_proj":
            for i, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                result |= {f"{prefix}.{i}.gate_proj.weight": gate, f"{prefix}.{i}.up_proj.weight": up}
        elif part == "down_proj":
            result |= {f"{prefix}.{i}.down_proj.weight": expert for i, expert in enumerate(tensor)}
        else:
            result[name] = tensor
    return result


def _fused(state: dict[str, Any]) -> dict[str, Any]:
    """The reverse of `_published`."""
    import torch

    result = {name: tensor for name, tensor in state.items() if ".experts." not in name}
    for prefix in sorted({name.split(".experts.")[0] for name in state if ".experts." in name}):
        num = len({name.split(".")[-3] for name in state if name.startswith(f"{prefix}.experts.")})
        gate, up, down = (
            [state[f"{prefix}.experts.{i}.{part}_proj.weight"] for i in range(num)]
            for part in ("gate", "up", "down")
        )
        pairs = [torch.cat(pair) for pair in zip(gate, up, strict=True)]
        result[f"{prefix}.experts.gate_up_proj"] = torch.stack(pairs)
        result[f"{prefix}.experts.down_proj"] = torch.stack(down)
    return result


if __name__ == "__main__":
    print(build(sys.argv[1], Path(sys.argv[2])))
