"""What is looked at before anything heavy is loaded, and what the operator is told at the start."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import ssl
from collections.abc import Iterator

from app.auth import KeyFormatError, Keyring, read_keys
from app.settings import Settings


class StartError(Exception):
    """The server cannot start like this; the text says what to change."""


def check(settings: Settings) -> Keyring:
    """The API keys. Raises StartError for what would otherwise fail only after minutes of loading."""
    if os.environ.get("WEB_CONCURRENCY") not in (None, "", "1"):
        raise StartError(
            "WEB_CONCURRENCY asks for several server processes, but the sessions, their limit and the engine "
            "live in one: unset it, and start more servers with a device and a port each."
        )
    if settings.tls.cert is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls.cert, settings.tls.key)
        except OSError as error:  # ssl.SSLError is one
            raise StartError(f"tls.cert, tls.key: {error}") from None
    try:
        return read_keys(settings.auth.keys.get_secret_value(), settings.auth.key_file)
    except KeyFormatError as error:
        raise StartError(str(error)) from None


@contextlib.contextmanager
def only_one(settings: Settings) -> Iterator[None]:
    """Hold the name of the server's address. Raises StartError when another server does.

    The port itself says so only when the other one listens; until then both would load. The name is one of
    Linux's abstract sockets: no file, and free again when the process is gone, however it went.
    """
    with socket.socket(socket.AF_UNIX) as name:
        if settings.port != 0:  # 0: any free port
            try:
                name.bind(f"\0metronome-{settings.host}:{settings.port}")
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                raise StartError(
                    f"a Metronome server holds {settings.host}:{settings.port} already: stop it, or choose "
                    "another --port and give each server its own device."
                ) from None
            _try_to_listen(settings.host, settings.port)
        yield


def _try_to_listen(host: str, port: int) -> None:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        socket.create_server(address[:2], family=family).close()
    except OSError as error:
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None


def greeting(settings: Settings, keyring: Keyring) -> str:
    """Where the server is and who may use it."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.host, settings.host)
    tls = "s" if settings.tls.cert is not None else ""
    base = f"{tls}://{host}:{settings.port}"
    if keyring.is_open:
        access = "open: no API keys are set"
        if not is_loopback(settings.host):
            access += (
                f"\n  WARNING   whoever reaches {settings.host}:{settings.port} can use this server; "
                "set METRONOME_AUTH_KEYS or --auth-key-file"
            )
    else:
        access = f"API keys of {', '.join(key.name for key in keyring.keys)}"
    return (
        f"Metronome serves {settings.model} on {settings.device}\n"
        f"  sessions  ws{base}/v1/stream\n"
        f"  health    http{base}/health\n"
        f"  capacity  http{base}/capacity\n"
        f"  access    {access}"
    )


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
