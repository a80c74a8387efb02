"""What must be set before torch and vLLM are imported, in one place.

`prepare_process` comes first, in the process's main function; it imports neither. `repair_torch_companions`
comes right before transformers or vLLM is imported; the engine's thread does that for itself.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from typing import Any

logger = logging.getLogger(__name__)

_FORCED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the EngineCore lives on our thread, not in a child process
    "VLLM_CONFIGURE_LOGGING": "0",  # one process, one logging configuration: the application's
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",  # a model is a directory by now: `published.find` comes before
    "TRANSFORMERS_OFFLINE": "1",
}
_DEFAULTS = {
    "OMP_WAIT_POLICY": "passive",  # spinning OpenMP threads would take the event loop's core
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
}

_torchvision_ops: list[Any] = []  # a torch.library.Library undoes its definitions when it is collected


def prepare_process(device: str, num_threads: int | None = None) -> None:
    """Set the process's environment for an engine on `device` ("cpu" or "cuda").

    `num_threads` is how many OpenMP threads compute on the CPU (None: one per core this process may use, or
    what OMP_NUM_THREADS says). torch reads it once, at import, and vLLM makes `torch.set_num_threads` a
    no-op; a call after torch's import therefore warns and changes nothing of it. Idempotent.
    """
    os.environ.update(_FORCED)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    if num_threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    if device == "cpu":
        # With Triton installed (for the kernels' tests) vLLM would pick its V2 runner, which is CUDA's.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if logging.getLogger("vllm").level == logging.NOTSET:
        logging.getLogger("vllm").setLevel(logging.ERROR)  # its warnings are a dozen lines of advice a start
    if num_threads is not None and "torch" in sys.modules:
        logger.warning("num_threads=%d comes too late: torch is imported already", num_threads)


def repair_torch_companions() -> None:
    """Make torchvision importable, and torchaudio and torchcodec absent, where their builds do not fit torch.

    vLLM pulls in the PyPI builds, which are made for CUDA's torch; next to the CPU build their import fails
    and takes transformers with it. torchvision lacks two operators: declaring them is enough, since audio
    models never call them, and some vLLM model files import it. The other two nothing here needs: they are
    made to look not installed. Each that works is left alone.

    mistral_common is hidden too: transformers imports it with every audio processor, which takes seconds, and
    fails where their versions do not fit; no family here is of Mistral's.
    """
    if "mistral_common" not in sys.modules:
        sys.modules["mistral_common"] = None  # type: ignore[assignment]
    try:
        importlib.import_module("torchvision")
    except ImportError:
        pass  # not installed: nothing imports it
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        _forget("torchvision")  # what the failed import left behind
        _declare_torchvision_ops()
    for name in ("torchaudio", "torchcodec"):
        try:
            importlib.import_module(name)
        except (ImportError, OSError, RuntimeError):
            _forget(name)
            sys.modules[name] = None  # type: ignore[assignment]  # import and find_spec now say: absent


def _forget(package: str) -> None:
    for name in [n for n in sys.modules if n == package or n.startswith(f"{package}.")]:
        del sys.modules[name]


def _declare_torchvision_ops() -> None:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for op in ("nms", "qnms"):
        library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _torchvision_ops.append(library)
