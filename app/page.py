"""The demo page: `/` and `/static/...`, from memory, so that no request reads a disk or names a path."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, HTTPException, Request, Response

DIRECTORY = Path(__file__).parents[1] / "static"
# Not from the system's table, which may call a module text/plain; browsers refuse to run those.
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Cache-Control": "no-cache",  # kept, but asked about each time: a new server must not meet an old page
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "microphone=(self), autoplay=(self), camera=(), geolocation=(), display-capture=()",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'{sockets}; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
_HOST = re.compile(r"[A-Za-z0-9.\-]+(:\d+)?|\[[0-9A-Fa-f:.]+\](:\d+)?")


@dataclass(frozen=True, slots=True)
class Asset:
    body: bytes
    media_type: str
    etag: str


def read_assets(directory: Path = DIRECTORY) -> dict[str, Asset]:
    """Every file of a known type, by its path below `directory`."""
    assets = {}
    for path in sorted(directory.rglob("*")):
        if path.suffix in MEDIA_TYPES and path.is_file():
            body = path.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            assets[path.relative_to(directory).as_posix()] = Asset(body, MEDIA_TYPES[path.suffix], etag)
    return assets


def content_policy(host: str) -> str:
    """The page may talk to its own server only.

    Not every browser counts ws://host as 'self', so the host is named too, if it looks like one.
    """
    sockets = f" ws://{host} wss://{host}" if _HOST.fullmatch(host) else ""
    return POLICY.format(sockets=sockets)


def make_router(assets: dict[str, Asset] | None = None) -> APIRouter:
    """Routes of the page; needs no key, since it holds no secret and asks for the key itself."""
    router = APIRouter(include_in_schema=False)
    found = read_assets() if assets is None else assets

    @router.api_route("/", methods=["GET", "HEAD"])
    async def index(request: Request) -> Response:
        return _respond(request, found.get("index.html"))

    @router.api_route("/static/{name:path}", methods=["GET", "HEAD"])
    async def static(request: Request, name: str) -> Response:
        return _respond(request, found.get(name))

    return router


def _respond(request: Request, asset: Asset | None) -> Response:
    if asset is None:
        raise HTTPException(404)
    headers = HEADERS | {
        "ETag": asset.etag,
        "Content-Security-Policy": content_policy(request.headers.get("host", "")),
        "Vary": "Host",
    }
    known = {tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")}
    if asset.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(asset.body, media_type=asset.media_type, headers=headers)
