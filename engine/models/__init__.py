"""Model families by name, by directory, and by their checkpoint's name on the Hub."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from engine.models import published
from engine.models.family import Family
from engine.models.prepare import Progress

DEFAULT_FAMILY = "smollm2-whisper"


def _smollm2_whisper(cache_dir: Path, progress: Progress | None, threads: int) -> Family:
    from engine.models import bundles
    from engine.models.prepare import prepare
    from engine.models.smollm2_whisper import SmolLM2Whisper

    llm_dir = prepare(bundles.SMOLLM2, cache_dir, progress)
    whisper_dir = prepare(bundles.WHISPER, cache_dir, progress)
    return SmolLM2Whisper(llm_dir, whisper_dir, threads=threads)


FAMILIES: dict[str, Callable[[Path, Progress | None, int], Family]] = {DEFAULT_FAMILY: _smollm2_whisper}


def load_family(
    name_or_path: str,
    cache_dir: Path,
    progress: Progress | None = None,
    *,
    threads: int | None = None,
    device: str = "cpu",
) -> Family:
    """Prepare a family's models (the network is used the first time only) and load it.

    The name is one of `FAMILIES`, whose models are kept in `cache_dir`; or the directory or Hub name of a
    published checkpoint (published.py). `threads` are for what runs on the CPU beside the engine; left out,
    half the cores, at most 4. `device` is the engine's: "cpu" or "cuda".
    Raises ValueError for a name that is not known, PrepareError when the models cannot be had.
    """
    load = FAMILIES.get(name_or_path)
    if load is not None:
        return load(cache_dir, progress, threads or max(1, min(4, (os.cpu_count() or 1) // 2)))
    if "/" not in name_or_path and not Path(name_or_path).is_dir():
        known = ", ".join(sorted(FAMILIES))
        raise ValueError(
            f"no model family is called {name_or_path!r}; known: {known}, a checkpoint's directory, or its "
            f"name on the Hub ({', '.join(published.EXAMPLES)})"
        )
    return published.load(name_or_path, progress, device=device)


def load_vad_file(cache_dir: Path, progress: Progress | None = None) -> Path:
    """The model file of `engine.audio.speech.SpeechDetector`, prepared likewise."""
    from engine.models import bundles
    from engine.models.prepare import prepare

    return prepare(bundles.VAD, cache_dir, progress) / bundles.VAD_FILE
