"""However the frames of a message arrive, the session hears the same."""

from __future__ import annotations

import asyncio
import random

import pytest
from websockets.frames import Frame, Opcode
from websockets.protocol import SERVER, Protocol, State

from app.connection import _hand_over, _is_between_messages
from tests.fuzz.test_frames import raw, raw_socket
from tests.support.serving import TIMEOUT_S, Serving, serving
from tests.support.stage import pcm

COMMIT = Frame(Opcode.TEXT, b'{"type": "input.commit"}').serialize(mask=True)


def audio_frames(size: int = 640) -> list[bytes]:
    """A second of audio, each frame with a mask of its own."""
    data = pcm(1.0)
    starts = range(0, len(data), size)
    return [Frame(Opcode.BINARY, data[i : i + size]).serialize(mask=True) for i in starts]


async def answered(server: Serving, pieces: list[bytes]) -> None:
    """The session heard one second and says so."""
    async with raw_socket(server) as (reader, writer):
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0)
        said = b""
        async with asyncio.timeout(TIMEOUT_S):
            while b"response.done" not in said and (data := await reader.read(65_536)):
                said += data
    assert b"heard 1000 ms" in said
    await server.until_empty()


@pytest.mark.parametrize("size", [100, 125, 126, 640, 32_000])
async def test_frames_of_any_length(size: int):
    async with serving(session__max_messages_per_s=None) as server:
        await answered(server, [*audio_frames(size), COMMIT])


async def test_cut_anywhere_and_many_at_once():
    rng = random.Random(4)
    async with serving() as server:
        for most in (7, 700, 70_000):
            whole, pieces = b"".join([*audio_frames(), COMMIT]), []
            while whole:
                cut = rng.randrange(1, most)
                pieces.append(whole[:cut])
                whole = whole[cut:]
            await answered(server, pieces)


async def test_fragments_and_pings_in_between():
    data, pieces = pcm(1.0), []
    for start in range(0, len(data), 6400):
        payload = data[start : start + 6400]
        pieces += [raw(Opcode.BINARY, payload[:1001], is_final=False), raw(Opcode.PING, b"?")]
        pieces += [raw(Opcode.CONT, payload[1001:2000], is_final=False), raw(Opcode.CONT, payload[2000:])]
    async with serving() as server:
        await answered(server, [*pieces, COMMIT])


async def test_a_long_frame_and_then_short_ones():
    long = raw(Opcode.PONG, b"") + Frame(Opcode.TEXT, b'{"type": "ping"}' + b" " * 70_000).serialize(
        mask=True
    )
    async with serving() as server:
        await answered(server, [long, *audio_frames(), COMMIT])


async def test_audio_inside_a_fragmented_message_is_a_protocol_error():
    async with serving() as server, raw_socket(server) as (reader, writer):
        writer.write(raw(Opcode.TEXT, b"{", is_final=False) + raw(Opcode.BINARY, bytes(640)))
        async with asyncio.timeout(TIMEOUT_S):
            said = await reader.read()
        assert said[said.rindex(0x88) + 2 :][:2] == (1002).to_bytes(2)


async def test_audio_right_behind_a_commit_belongs_to_the_next_turn():
    async with serving(session__max_messages_per_s=None) as server, raw_socket(server) as (reader, writer):
        writer.write(b"".join([*audio_frames(), COMMIT, *audio_frames(), *audio_frames(), COMMIT]))
        said = b""
        async with asyncio.timeout(TIMEOUT_S):
            while said.count(b"response.done") < 2 and (data := await reader.read(65_536)):
                said += data
    assert b"heard 2000 ms" in said


async def test_audio_goes_past_the_queue(monkeypatch: pytest.MonkeyPatch):
    """Only what came before the handler began, or behind a text message, may be queued."""
    queued: list[str] = []
    put = asyncio.Queue.put_nowait

    def counted(self: asyncio.Queue, item: object) -> None:
        if isinstance(item, dict) and "bytes" in item:
            queued.append(item["type"])
        put(self, item)

    async with serving() as server, server.client(turn="manual") as client:
        await client.until("session.created")
        await client.say(type="ping")
        await client.until("pong")
        monkeypatch.setattr(asyncio.Queue, "put_nowait", counted)
        for start in range(0, 32_000, 640):
            await client.audio(pcm(1.0)[start : start + 640])
        await client.say(type="input.commit")
        await client.until("response.done")
        assert client.text() == "echo: heard 1000 ms"
        assert not queued


async def test_whole_frames_of_audio_go_past_the_parser(monkeypatch: pytest.MonkeyPatch):
    """What is cut, and what is no audio, does not."""
    parsed: list[int] = []
    receive = Protocol.receive_data

    def counted(self: Protocol, data: bytes) -> None:
        parsed.append(len(data))
        receive(self, data)

    frames = audio_frames()
    async with serving() as server, raw_socket(server) as (reader, writer):
        said = b""

        async def until(word: bytes) -> None:
            nonlocal said
            async with asyncio.timeout(TIMEOUT_S):
                while word not in said:
                    said += await reader.read(65_536)

        async def heard(num_frames: int) -> None:
            async with asyncio.timeout(TIMEOUT_S):
                while server.service.conductor.tally().audio_samples < 320 * num_frames:
                    await asyncio.sleep(0.001)

        writer.write(raw(Opcode.TEXT, b'{"type": "ping"}'))
        await until(b"pong")
        monkeypatch.setattr(Protocol, "receive_data", counted)
        for number, frame in enumerate(frames, start=1):
            if number != 30:
                writer.write(frame)
            else:
                writer.write(frame[:300])
                async with asyncio.timeout(TIMEOUT_S):
                    while not parsed:
                        await asyncio.sleep(0.001)
                writer.write(frame[300:])
            await heard(number)
        assert parsed == [300, len(frames[29]) - 300]
        writer.write(COMMIT)
        await until(b"response.done")
    assert b"heard 1000 ms" in said
    assert parsed[2] == len(COMMIT)


@pytest.mark.parametrize("cut", [2, 4, 8])
async def test_a_read_that_ends_inside_or_right_behind_a_header(cut: int, monkeypatch: pytest.MonkeyPatch):
    """The parser's buffer is empty then; what follows on the wire looks like short frames, and is none."""
    num_parsed = 0
    receive = Protocol.receive_data

    def counted(self: Protocol, data: bytes) -> None:
        nonlocal num_parsed
        num_parsed += len(data)
        receive(self, data)

    frame = b"\x82\xfe" + b"\x82" * (2 + 4 + 0x8282)  # length, mask, silence: every byte begins a frame
    async with serving() as server, raw_socket(server) as (reader, writer):
        said = b""
        async with asyncio.timeout(TIMEOUT_S):
            writer.write(raw(Opcode.TEXT, b'{"type": "ping"}'))
            while b"pong" not in said:
                said += await reader.read(65_536)
            monkeypatch.setattr(Protocol, "receive_data", counted)
            writer.write(frame[:cut])
            while num_parsed < cut:
                await asyncio.sleep(0.001)
            writer.write(frame[cut:] + COMMIT)
            while b"response.done" not in said and (data := await reader.read(65_536)):
                said += data
        assert server.service.conductor.tally().audio_samples == 0x8282 // 2
    assert b"heard 1044 ms" in said


def heard(
    pieces: list[bytes], *, goes_past: bool
) -> tuple[list[tuple[Opcode, bool, bytes]], bytes, State, int]:
    """Frames that come out of `pieces`, in order, what is answered, how the connection stands; and how many
    frames went past the parser."""
    conn = Protocol(SERVER, state=State.OPEN, max_size=1 << 20)
    frames: list[tuple[Opcode, bool, bytes]] = []
    num_past = 0
    for piece in pieces:
        rest = piece
        if goes_past and _is_between_messages(conn):
            before = len(frames)
            rest = _hand_over(piece, lambda data: frames.append((Opcode.BINARY, True, data)))
            num_past += len(frames) - before
        if rest:
            conn.receive_data(rest)
        for event in conn.events_received():
            assert isinstance(event, Frame)
            frames.append((event.opcode, event.fin, bytes(event.data)))
    return frames, b"".join(conn.data_to_send()), conn.state, num_past


def test_past_the_parser_or_through_it_is_the_same(monkeypatch: pytest.MonkeyPatch):
    """Random streams of all kinds of frames, cut anywhere; payloads that look like frames among them."""
    rng = random.Random(7)
    monkeypatch.setattr("websockets.frames.secrets.token_bytes", bytes)  # a mask of zeros hides nothing
    frame_in_frame = b"\x82\x81\0\0\0\0a"
    kinds = [Opcode.BINARY] * 12 + [Opcode.TEXT, Opcode.PING, Opcode.PONG]
    sizes = [*[0, 1, 2, 125, 126, 127, 640, 640, 640] * 4, 65_535, 65_536]
    num_past = 0
    for _ in range(400):
        stream = b""
        for _ in range(rng.randrange(1, 12)):
            kind = rng.choice(kinds)
            size = rng.choice(sizes) if kind in (Opcode.BINARY, Opcode.TEXT) else rng.choice([0, 1, 125])
            data = (frame_in_frame * (size // 7 + 1))[:size]
            if kind is Opcode.BINARY and rng.random() < 0.2:  # in fragments
                stream += Frame(kind, data, fin=False).serialize(mask=True)
                stream += Frame(Opcode.CONT, data).serialize(mask=True)
            else:
                stream += Frame(kind, data).serialize(mask=rng.random() < 0.995)
        if rng.random() < 0.1:
            stream += Frame(Opcode.CLOSE, b"\x03\xe8").serialize(mask=True) + audio_frames()[0]
        pieces, most = [], rng.choice([15, 700, 70_000])
        while stream:
            cut = rng.randrange(1, most) if rng.random() < 0.8 else rng.choice([2, 4, 6, 8])
            pieces.append(stream[:cut])
            stream = stream[cut:]
        *through, none = heard(pieces, goes_past=False)
        *past, some = heard(pieces, goes_past=True)
        assert past == through and none == 0
        num_past += some
    assert num_past > 100
