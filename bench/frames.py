"""Clients for the front end's bench: plain sockets and frames built once, as cheap as Python allows.

    python -m bench.frames PORT SESSIONS SECONDS TURN [FIRST]

Prints a line "open" when all sessions are, sends on a schedule when a line comes in, then prints its figures.
"""

from __future__ import annotations

import json
import random
import select
import socket
import sys
import time
from pathlib import Path

import numpy as np
import soundfile

FRAME_S = 0.02
FRAME_BYTES = 640  # 20 ms at 16 kHz
SPEECH = Path(__file__).parents[1] / "tests" / "data" / "speech" / "austen-0870.wav"
PAUSE_S = 2.0
REQUEST = (
    "GET /v1/stream?sample_rate=16000&turn={turn} HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\n"
    "Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def speech_frames() -> list[bytes]:
    """A recording and a pause as WebSocket frames; masked, as a client's must be, with a mask of zeros."""
    samples, _ = soundfile.read(SPEECH, dtype="int16")
    pcm = np.concatenate([samples, np.zeros(round(PAUSE_S * 16_000), np.int16)]).tobytes()
    head = bytes([0x82, 0x80 | 126]) + FRAME_BYTES.to_bytes(2) + bytes(4)
    starts = range(0, len(pcm) - FRAME_BYTES + 1, FRAME_BYTES)
    return [head + pcm[start : start + FRAME_BYTES] for start in starts]


def connect(port: int, turn: str) -> socket.socket:
    peer = socket.create_connection(("127.0.0.1", port))
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.sendall(REQUEST.format(turn=turn).encode())
    answer = b""
    while b"session.created" not in answer:
        piece = peer.recv(65_536)
        if not piece or b'"error"' in piece:
            raise RuntimeError(f"not admitted: {answer + piece!r}")
        answer += piece
    peer.setblocking(False)
    return peer


def main() -> None:
    port, count, seconds, turn = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    rng, frames = random.Random(int(sys.argv[5]) if len(sys.argv) > 5 else 0), speech_frames()
    peers = [connect(port, turn) for _ in range(count)]
    poll = select.epoll()
    by_number = {peer.fileno(): peer for peer in peers}
    for peer in peers:
        poll.register(peer, select.EPOLLIN)
    phases = sorted((rng.random() * FRAME_S, rng.randrange(len(frames)), peer) for peer in peers)
    figures: dict[str, float] = {
        "sent": 0,
        "blocked": 0,
        "events_bytes": 0,
        "dropped_warnings": 0,
        "closed": 0,
    }
    late_s: list[float] = []
    print("open", flush=True)
    sys.stdin.readline()
    begin, cpu = time.monotonic(), time.process_time()
    for round_number in range(round(seconds / FRAME_S)):
        start = begin + round_number * FRAME_S
        for phase, offset, peer in phases:
            if (ahead := start + phase - time.monotonic()) > 0.001:
                time.sleep(ahead)
            try:
                figures["sent"] += peer.send(frames[(offset + round_number) % len(frames)]) > 0
            except BlockingIOError:  # the server does not keep up: this frame is lost
                figures["blocked"] += 1
            except OSError:
                figures["closed"] += 1
        late_s.append(time.monotonic() - start - FRAME_S)
        for number, _ in poll.poll(0):
            try:
                data = by_number[number].recv(65_536)
            except OSError:
                data = b""
            if not data:
                poll.unregister(number)
            figures["events_bytes"] += len(data)
            figures["dropped_warnings"] += data.count(b"audio_dropped")
    late_s.sort()
    figures["schedule_slip_p99_ms"] = round(1000 * max(0.0, late_s[int(0.99 * (len(late_s) - 1))]), 1)
    figures["client_cpu_s"] = round(time.process_time() - cpu, 2)
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
