"""API keys and origins: who may use this server. Knows no sockets; `door.py` does.

Keys are given as `NAME KEY [MAX_SESSIONS]`, one a line of a file, or separated by commas in the environment.
Only their digests are kept, so that no log, error or dump can show one.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.errors import SessionError, Unavailable

MIN_KEY_CHARS = 16  # shorter ones can be guessed
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_KEY = re.compile(r"[A-Za-z0-9._~+/=-]+")  # what fits behind "Bearer" (RFC 6750)


class NotAllowed(SessionError):
    code, status, close_code = "unauthorized", 401, 1008


class WrongOrigin(NotAllowed):
    code, status = "origin_not_allowed", 403


class KeyInUse(Unavailable):
    """All sessions that this key may have are running."""

    code, status = "key_limit", 429


class KeyFormatError(ValueError):
    """Says where and what is wrong, and never shows the key."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    name: str  # what logs call its owner
    digest: bytes = field(repr=False)
    max_sessions: int | None  # at the same time; None: as many as the server takes; 0: HTTP only


class Keyring:
    """No keys: the server is open to everybody who reaches it."""

    def __init__(self, keys: Sequence[ApiKey] = ()) -> None:
        self.keys = tuple(keys)

    @property
    def is_open(self) -> bool:
        return not self.keys

    def find(self, candidate: str) -> ApiKey | None:
        """Compares with every key, also after a match: the time it takes says nothing about any of them."""
        digest = _digest(candidate)
        found = None
        for key in self.keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


def read_keys(texts: str, file: Path | None) -> Keyring:
    """Keys of the environment's text and of the file together. Raises KeyFormatError."""
    keys = [_parse(line, f"auth.keys, entry {i}") for i, line in enumerate(_entries(texts, ","), 1) if line]
    if file is not None:
        try:
            content = file.expanduser().read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise KeyFormatError(f"auth.key_file {file}: {getattr(error, 'strerror', 'not text')}") from None
        lines = enumerate(_entries(content, "\n"), 1)
        keys += [_parse(line, f"auth.key_file {file}, line {i}") for i, line in lines if line]
        if not keys:  # an empty file must not open the server
            raise KeyFormatError(f"auth.key_file {file}: holds no key")
    for what in ("name", "digest"):
        if len({getattr(key, what) for key in keys}) < len(keys):
            raise KeyFormatError(f"auth: two keys have the same {'name' if what == 'name' else 'text'}")
    return Keyring(keys)


def bearer(header: str | None) -> str | None:
    """The key of an Authorization header; None without one, or with another scheme's."""
    scheme, _, key = (header or "").strip().partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


def is_allowed_origin(origin: str | None, host: str, allowed: frozenset[str]) -> bool:
    """`origin` and `host` are the request's headers. Browsers always send an origin; other clients need none.

    A page of this very server is always allowed. Its scheme is not compared: behind a proxy that ends TLS it
    is another one than ours.
    """
    if origin is None or "*" in allowed or origin.lower() in allowed:
        return True
    scheme, _, authority = origin.lower().partition("://")
    return scheme in ("http", "https") and authority != "" and authority == host.lower()


def _entries(text: str, separator: str) -> list[str]:
    return [entry.partition("#")[0].strip() for entry in text.split(separator)]


def _parse(entry: str, where: str) -> ApiKey:
    fields = entry.split()
    if not 2 <= len(fields) <= 3 or not _NAME.fullmatch(fields[0]):
        raise KeyFormatError(f"{where}: must be NAME KEY [MAX_SESSIONS]; a name is letters, digits, . _ -")
    name, key, limit = (*fields, "")[:3]
    if not _KEY.fullmatch(key) or len(key) < MIN_KEY_CHARS:
        raise KeyFormatError(
            f"{where}: the key of {name} needs {MIN_KEY_CHARS} or more letters, digits or . _ ~ + / = -"
        )
    if limit and not limit.isdecimal():
        raise KeyFormatError(f"{where}: the session limit of {name} must be a whole number from 0 on")
    return ApiKey(name, _digest(key), int(limit) if limit else None)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()
