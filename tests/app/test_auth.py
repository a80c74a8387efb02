from pathlib import Path

import pytest

from app.auth import KeyFormatError, Keyring, bearer, is_allowed_origin, read_keys
from app.limits import BURST_S, MessageRate, TooFast

WEB, PHONE = "w" * 16, "p" * 20


def test_keys_come_from_text_and_file_with_names_and_limits(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text(f"# who may enter\n\nphone {PHONE} 3  # the app\n")
    keyring = read_keys(f"web {WEB}", file)
    assert [(key.name, key.max_sessions) for key in keyring.keys] == [("web", None), ("phone", 3)]
    assert not keyring.is_open
    web, phone = keyring.find(WEB), keyring.find(PHONE)
    assert web is keyring.keys[0] and phone is keyring.keys[1]


@pytest.mark.parametrize("candidate", ["", "w" * 15, "w" * 17, WEB.upper(), f"web {WEB}", "ключ", "\ud800"])
def test_another_key_is_nobody(candidate: str):
    assert read_keys(f"web {WEB}", None).find(candidate) is None


def test_every_key_is_compared_whichever_matches(monkeypatch: pytest.MonkeyPatch):
    compared: list[bytes] = []
    keyring = read_keys(f"a {'a' * 16}, b {'b' * 16}, c {'c' * 16}", None)
    monkeypatch.setattr("app.auth.hmac.compare_digest", lambda x, y: compared.append(x) or x == y)
    for candidate in ("a" * 16, "c" * 16, "nobody's"):
        compared.clear()
        keyring.find(candidate)
        assert compared == [key.digest for key in keyring.keys]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("web", "NAME KEY"),
        (f"web {WEB} 3 4", "NAME KEY"),
        (f"we/b {WEB}", "NAME KEY"),
        ("web short-secret", "16"),
        (f"web {WEB}ä", "letters"),
        (f"web {WEB} -1", "whole number"),
        (f"web {WEB}, web {PHONE}", "same name"),
        (f"web {WEB}, phone {WEB}", "same text"),
    ],
)
def test_wrong_keys_are_refused_without_showing_them(text: str, words: str):
    with pytest.raises(KeyFormatError, match=words) as caught:
        read_keys(text, None)
    assert WEB not in str(caught.value) and "short-secret" not in str(caught.value)


def test_a_key_file_that_is_missing_or_empty_does_not_open_the_server(tmp_path: Path):
    with pytest.raises(KeyFormatError, match="No such file"):
        read_keys("", tmp_path / "keys")
    (tmp_path / "keys").write_text("# none yet\n")
    with pytest.raises(KeyFormatError, match="no key"):
        read_keys("", tmp_path / "keys")
    assert read_keys("", None).is_open


def test_no_key_can_be_read_from_the_keyring():
    keyring: Keyring = read_keys(f"web {WEB}", None)
    assert WEB not in repr(keyring.keys)


@pytest.mark.parametrize(
    ("header", "key"),
    [
        ("Bearer abc", "abc"),
        ("bearer  abc ", "abc"),
        ("Basic abc", None),
        ("abc", None),
        ("", None),
        (None, None),
    ],
)
def test_bearer(header: str | None, key: str | None):
    assert bearer(header) == key


@pytest.mark.parametrize(
    ("origin", "is_allowed"),
    [
        (None, True),  # no browser
        ("https://talk.example:8443", True),  # a page of this server, behind a proxy that ends TLS
        ("HTTP://TALK.EXAMPLE:8443", True),
        ("https://friend.example", True),
        ("http://friend.example", False),
        ("https://friend.example.evil.example", False),
        ("https://talk.example", False),  # another port is another origin
        ("null", False),  # sandboxed frames and files
        ("", False),
        ("chrome-extension://talk.example:8443", False),
    ],
)
def test_origins(origin: str | None, is_allowed: bool):
    assert is_allowed_origin(origin, "talk.example:8443", frozenset({"https://friend.example"})) is is_allowed
    assert is_allowed_origin(origin, "", frozenset({"*"}))
    assert is_allowed_origin(origin, "", frozenset()) is (origin is None)


def test_messages_may_come_in_bursts_but_not_for_long():
    rate = MessageRate(100.0, now=0.0)
    for _ in range(round(BURST_S * 100)):
        rate.count(0.0)
    with pytest.raises(TooFast):
        rate.count(0.0)
    for i in range(1, 1001):  # at exactly the rate for ever
        rate.count(i / 100 + 0.001)
    rate.count(1000.0)
    for _ in range(round(BURST_S * 100) - 1):  # a long silence saves up no more than the burst
        rate.count(1000.0)
    with pytest.raises(TooFast):
        rate.count(1000.0)
    unlimited = MessageRate(None, now=0.0)
    for _ in range(10_000):
        unlimited.count(0.0)
