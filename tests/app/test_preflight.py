import socket
import subprocess
import sys
from pathlib import Path

import pytest
import trustme

from app.options import load
from app.preflight import StartError, check, greeting, only_one
from app.settings import Settings, resolve

KEY = "secret-0123456789"


def settings(tmp_path: Path, **options: str) -> Settings:
    given = {tuple(name.split("__")): value for name, value in options.items()}
    return resolve(load({("model",): "null", ("cache_dir",): str(tmp_path)} | given))


def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WEB_CONCURRENCY", "1")
    check(settings(tmp_path))
    monkeypatch.setenv("WEB_CONCURRENCY", "4")
    with pytest.raises(StartError, match="WEB_CONCURRENCY"):
        check(settings(tmp_path))


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def test_a_second_server_on_the_port_is_refused_before_it_loads_anything(tmp_path: Path):
    port, other_port = free_port(), free_port()
    options = settings(tmp_path, port=port)
    holder = (
        "import sys; from app.preflight import only_one; from app.options import load; "
        "from app.settings import resolve\n"
        "with only_one(resolve(load({('port',): sys.argv[1]}))): print('held', flush=True); input()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder, port], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with pytest.raises(StartError, match=rf"holds 127\.0\.0\.1:{port}"), only_one(options):
            pass
        any_port = settings(tmp_path, port="0")
        with only_one(settings(tmp_path, port=other_port)), only_one(any_port), only_one(any_port):
            pass
        process.kill()
    with only_one(options):  # the dead hold nothing
        pass


def test_an_address_that_cannot_be_had_is_told_at_once(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        with pytest.raises(StartError, match=f"127.0.0.1:{port}: Address already in use"):
            with only_one(settings(tmp_path, port=port)):
                pass
    with only_one(settings(tmp_path, port=port)):
        pass
    with pytest.raises(StartError, match=r"cannot listen on 192\.0\.2\.1"):
        with only_one(settings(tmp_path, host="192.0.2.1", port=port)):
            pass


def test_tls_files_are_read_at_once(tmp_path: Path):
    good, bad = tmp_path / "good.pem", tmp_path / "bad.pem"
    trustme.CA().issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(good)
    bad.write_text("no certificate")
    check(settings(tmp_path, tls__cert=str(good)))
    for cert in (bad, tmp_path / "absent.pem"):
        with pytest.raises(StartError, match=r"tls\.cert"):
            check(settings(tmp_path, tls__cert=str(cert)))
    with pytest.raises(StartError, match=r"absent.*No such file"):
        check(settings(tmp_path, auth__key_file=str(tmp_path / "absent")))


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ({}, ["sessions  ws://127.0.0.1:8000/v1/stream", "open: no API keys"]),
        ({"host": "::1", "port": "81"}, ["open: no API keys"]),
        ({"host": "0.0.0.0"}, ["ws://127.0.0.1:8000", "WARNING   whoever reaches 0.0.0.0:8000"]),
        ({"host": "0.0.0.0", "auth__keys": f"web {KEY}, phone {KEY}2"}, ["API keys of web, phone"]),
    ],
)
def test_the_start_says_who_may_come_in(tmp_path: Path, options: dict[str, str], lines: list[str]):
    given = settings(tmp_path, **options)
    text = greeting(given, check(given))
    assert all(line in text for line in lines) and KEY not in text
    is_exposed = "auth__keys" not in options and options.get("host") == "0.0.0.0"
    assert ("WARNING" in text) is is_exposed
