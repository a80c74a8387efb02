"""Published checkpoints: from what the operator typed to a directory, and from its config.json to a family.

A checkpoint is a directory as its makers publish it: config.json, safetensors, tokenizer, preprocessor. It is
given by its path, or by its name on the Hub ("Qwen/Qwen2.5-Omni-7B"), which is downloaded once into the Hub
client's own cache (HF_HOME says where). Behind an @ the name may carry a revision: a branch, a tag, or a
commit, which alone stays what it is. All that is read, by us and by vLLM, is read of that one commit's
directory; a start without a revision says which commit it was.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
from pathlib import Path
from typing import Any

from engine.models.family import Family
from engine.models.prepare import PrepareError, Progress

ARCHITECTURES = {
    "Qwen2_5OmniModel": "qwen_omni:Qwen25Omni",
    "Qwen2_5OmniForConditionalGeneration": "qwen_omni:Qwen25Omni",
    "Qwen3OmniMoeForConditionalGeneration": "qwen_omni:Qwen3Omni",
    "MiniCPMO": "minicpmo:minicpmo",
}
"""`architectures` of a config.json -> module, and what makes the family there of (directory, device=...)."""

EXAMPLES = ("Qwen/Qwen2.5-Omni-7B", "Qwen/Qwen3-Omni-30B-A3B-Instruct", "openbmb/MiniCPM-o-4_5")

log = logging.getLogger(__name__)

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_REVISION = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)*")  # branches may be named in parts: "refs/pr/3"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_WANTED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")  # no code: none of it is ever run


def load(model: str, progress: Progress | None = None, *, device: str = "cpu") -> Family:
    """The family of a directory or a Hub name[@revision]; `device` ("cpu" or "cuda") computes its features.

    Raises PrepareError where the checkpoint cannot be had, ValueError where it is none that we serve.
    """
    directory = find(model, progress)
    return family_class(directory)(directory, device=device)


def find(model: str, progress: Progress | None = None) -> Path:
    """The checkpoint's directory; downloads it where `model` is a Hub name[@revision].

    Raises PrepareError.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path.absolute()
    name, at, revision = model.partition("@")
    if not _HUB_NAME.fullmatch(name) or name.startswith("."):
        raise PrepareError(f"no model in {model}: there is no such directory")
    if at and not _REVISION.fullmatch(revision):
        raise PrepareError(
            f"{model}: behind the @ stands a branch, a tag or a commit of {name}, and {revision!r} is none"
        )
    from huggingface_hub import snapshot_download

    if progress is not None:
        progress(f"fetching {model}", 0.0)
    try:
        directory = Path(snapshot_download(name, revision=revision or None, allow_patterns=list(_WANTED)))
    except Exception as error:  # the client raises its own, requests' and the operating system's
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise PrepareError(
            f"{model} could not be downloaded: {first} Connect to the Hub and start again, or copy the "
            f"checkpoint's files (config.json, *.safetensors, tokenizer, preprocessor) into a directory and "
            f"give its path: --model /path/to/{name.split('/')[1]}"
        ) from error
    if not _COMMIT.fullmatch(revision):
        log.info("%s is %s: --model with that name keeps to it", model, checkpoint_name(directory))
    return directory


def checkpoint_name(directory: Path) -> str:
    """NAME@COMMIT of a directory in the Hub client's cache, the path of any other."""
    kind, _, repository = directory.parent.parent.name.partition("--")
    owner_name = repository.replace("--", "/", 1)
    is_cached = (kind, directory.parent.name) == ("models", "snapshots") and _HUB_NAME.fullmatch(owner_name)
    return f"{owner_name}@{directory.name}" if is_cached else str(directory)


def read_config(directory: Path) -> dict[str, Any]:
    """The checkpoint's config.json. Raises ValueError where there is none that can be read."""
    try:
        config = json.loads((directory / "config.json").read_text())
    except FileNotFoundError:
        raise ValueError(f"{directory} holds no model: config.json is missing") from None
    except ValueError as error:
        raise ValueError(f"{directory / 'config.json'} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{directory / 'config.json'} is no model's configuration")
    return config


def family_class(directory: Path) -> Any:
    """What makes the checkpoint's family. Raises ValueError for an architecture that we do not serve."""
    found = read_config(directory).get("architectures") or []
    for architecture in found:
        if architecture in ARCHITECTURES:
            module, name = ARCHITECTURES[architecture].split(":")
            return getattr(importlib.import_module(f"engine.models.{module}"), name)
    known = ", ".join(sorted(ARCHITECTURES))
    raise ValueError(
        f"{directory} holds {', '.join(found) or 'a model without architectures'}, which is not served here; "
        f"known architectures: {known}"
    )
