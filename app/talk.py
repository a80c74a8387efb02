"""`metronome talk`: a client that speaks recordings, or the microphone, at real time and prints the answers.

The speaking side sends 20 ms chunks on a schedule and goes on with silence until the turn is answered, as a
real microphone would; the listening side reads events. They share one `Turns`, which knows no I/O.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
import wave
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlencode

import websockets
from rich.console import Console
from rich.markup import escape
from websockets.asyncio.client import ClientConnection, connect

from app.playing import REPORT_S, FirstTimes, Player, keep_reporting
from app.speaking import (
    CHUNK_MS,
    ClientError,
    Samples,
    Sleep,
    Speaker,
    at_one_rate,
    chunks,
    read_recording,
)

MIC_RATE = 48_000
TURNS = ("server_vad", "manual")
ANSWERED, FAILED, REFUSED = 0, 1, 3
"""Exit statuses."""


class TalkError(ClientError):
    """The talk cannot go on."""


@dataclass(frozen=True, slots=True)
class TalkOptions:
    url: str
    turn: str = "server_vad"
    instructions: str | None = None
    max_tokens: int | None = None
    wait_s: float = 60.0  # for an answer, from the recording's end
    is_aloud: bool = False  # ask for spoken answers
    out: Path | None = None  # a WAV file for them


class Printer(Protocol):
    def event(self, event: dict[str, Any]) -> None: ...

    def problem(self, message: str) -> None: ...


class JsonPrinter:
    """Each event as one line, as it came."""

    def event(self, event: dict[str, Any]) -> None:
        print(json.dumps(event, ensure_ascii=False), flush=True)

    def problem(self, message: str) -> None:
        print(f"metronome: {message}", file=sys.stderr)


class TextPrinter:
    """For people: the transcript, the answer as it streams, what went wrong."""

    def __init__(self, verbose: bool = False, console: Console | None = None) -> None:
        self._verbose = verbose
        self._console = console or Console(highlight=False, soft_wrap=True)

    def event(self, event: dict[str, Any]) -> None:
        show = self._console.print
        match event.get("type"):
            case "session.created":
                show(
                    f"[dim]session {event.get('id')}: {event.get('model')}, "
                    f"{event.get('sample_rate')} Hz, budget {event.get('budget_ms')} ms[/dim]"
                )
            case "input.transcript":
                show(f"[cyan]you:[/cyan] {escape(str(event.get('text', '')))}")
            case "response.created":
                show("[green]answer:[/green] ", end="")
            case "response.text.delta":
                show(escape(str(event.get("delta", ""))), end="")
            case "response.done":
                reason = event.get("reason")
                show("" if reason == "stop" else f" [dim]({reason})[/dim]")
            case "response.heard":
                show(f"[dim]the answer was heard up to: {escape(str(event.get('text', '')))}[/dim]")
            case "client.timing":
                sound_ms = event.get("first_sound_ms")
                sound = "" if sound_ms is None else f", first sound after {sound_ms} ms"
                show(f"[dim]first text after {event.get('first_text_ms')} ms{sound}[/dim]")
            case "warning":
                show(f"[yellow]warning:[/yellow] {escape(str(event.get('message')))}")
            case "tick" if self._verbose:
                show(
                    f"[dim]tick {event.get('seq')}: {event.get('audio_ms')} ms of audio, "
                    f"{event.get('lateness_ms')} ms late, {event.get('tokens')} tokens, "
                    f"{event.get('kv_tokens')} in the cache[/dim]"
                )

    def problem(self, message: str) -> None:
        Console(stderr=True, soft_wrap=True).print(f"[red]metronome:[/red] {escape(message)}")


class Turns:
    """What the events say about the turn: whether its answer has ended, and how the session did."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.num_answers = 0
        self.error: dict[str, Any] | None = None  # the last error event
        self._is_speaking = False
        self._is_owed = False  # speech ended, its answer has not
        self._has_words = False  # and words were heard in it
        self._is_answering = False
        self._is_aloud = False
        self._is_sounding = False  # sound of an answer is still to come
        self._silent: str | None = (
            None  # the answer that gets no more: where the voice fails, its text goes on
        )

    def on_event(self, event: dict[str, Any]) -> None:
        match event.get("type"):
            case "session.created" | "session.updated":
                self._is_aloud = bool(event.get("voice"))
            case "response.text.delta":
                self._is_sounding = self._is_aloud and event.get("response_id") != self._silent
            case "response.audio.done" | "response.flush":
                self._is_sounding, self._silent = False, event.get("response_id")
            case "speech.started":
                self._is_speaking = True
            case "speech.stopped":
                self._is_speaking, self._is_owed = False, True
            case "input.transcript":
                self._has_words = self._has_words or bool(str(event.get("text", "")).strip())
                self._is_owed = self._is_owed and self._has_words  # a cough is not answered
            case "response.created":
                self._is_answering, self._has_words = True, False
            case "response.done":
                self._is_answering = self._is_owed = False
                self.num_answers += 1
            case "error":
                self.error = event
        self.changed.set()

    def is_answered(self, num_before: int) -> bool:
        """All that was said since then has been answered. A pause in a recording may give several answers."""
        is_open = self._is_speaking or self._is_owed or self._is_answering or self._is_sounding
        return self.num_answers > num_before and not is_open


async def speak_turn(
    socket: ClientConnection, speaker: Speaker, ears: Ears, recording: Sequence[bytes], options: TalkOptions
) -> None:
    """One recording, then silence (server_vad) or a commit (manual), until its answer is over, sound too."""
    turns = ears.turns
    before = turns.num_answers
    for chunk in recording:
        await speaker.send(chunk)
    ears.times.spoken(time.monotonic())
    if options.turn == "manual":
        await socket.send(json.dumps({"type": "input.commit"}))

    async def answered() -> None:
        while turns.error is None:
            is_playing = ears.player.is_playing(time.monotonic())
            if turns.is_answered(before) and not is_playing:
                return
            if options.turn == "server_vad":
                await speaker.send(speaker.silence)
                continue
            turns.changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPORT_S if is_playing else None):
                    await turns.changed.wait()

    try:
        async with asyncio.timeout(options.wait_s):
            await answered()
    except TimeoutError:
        raise TalkError(f"no answer within {options.wait_s:g} s of the end of the recording") from None
    if turns.error is None:
        ears.printer.event(ears.times.as_event())
    speaker.restart()


class Ears:
    """The listening side: prints and notes events, and keeps the sound if asked."""

    def __init__(self, printer: Printer, keeps_sound: bool = False) -> None:
        self.printer = printer
        self.keeps_sound = keeps_sound
        self.turns = Turns()
        self.player = Player()
        self.times = FirstTimes()
        self.sound = bytearray()  # PCM of all answers
        self._rate = 24_000

    async def listen(self, socket: ClientConnection) -> None:
        """Until the server closes."""
        with contextlib.suppress(websockets.ConnectionClosed):
            async for message in socket:
                if isinstance(message, bytes):
                    if self.keeps_sound:
                        self.sound += message
                    continue
                event, now = json.loads(message), time.monotonic()
                self._rate = event.get("voice_sample_rate") or self._rate
                self.printer.event(event)
                self.times.on_event(event, now)
                self.player.on_event(event, now)
                self.turns.on_event(event)

    def save(self, path: Path) -> None:
        """All that was spoken, as a WAV file. Raises ClientError."""
        try:
            with path.open("wb") as raw, wave.open(raw, "wb") as file:
                file.setnchannels(1)
                file.setsampwidth(2)
                file.setframerate(self._rate)
                file.writeframes(bytes(self.sound))
        except OSError as error:
            raise TalkError(f"cannot write {path}: {error}") from None


async def microphone(rate: int) -> AsyncIterator[bytes]:
    """20 ms chunks as they are captured; when the network stalls for over 5 s the oldest are dropped."""
    try:
        import sounddevice  # pyright: ignore[reportMissingImports]
    except (ImportError, OSError) as error:
        raise TalkError(
            f"no microphone support ({error}): pip install sounddevice; "
            "on Linux also apt-get install libportaudio2"
        ) from None
    loop = asyncio.get_running_loop()
    captured: asyncio.Queue[bytes] = asyncio.Queue(maxsize=250)

    def keep(chunk: bytes) -> None:
        if captured.full():
            captured.get_nowait()
        captured.put_nowait(chunk)

    def on_audio(data: Any, num_frames: int, when: Any, status: Any) -> None:
        loop.call_soon_threadsafe(keep, bytes(data))

    size = rate * CHUNK_MS // 1000
    try:
        stream = sounddevice.RawInputStream(
            samplerate=rate, blocksize=size, channels=1, dtype="int16", callback=on_audio
        )
    except sounddevice.PortAudioError as error:
        raise TalkError(f"the microphone cannot be opened: {error}") from None
    with stream:
        while True:
            yield await captured.get()


async def converse(
    options: TalkOptions, files: Sequence[Path], printer: Printer, sleep: Sleep = asyncio.sleep
) -> int:
    """One session: each file a turn, or the microphone where there are none. Gives the exit status."""
    recordings, rate = at_one_rate([read_recording(path) for path in files]) if files else ([], MIC_RATE)
    query: dict[str, Any] = {"sample_rate": rate, "turn": options.turn}
    if options.max_tokens is not None:
        query["max_tokens"] = options.max_tokens
    if options.is_aloud:
        query["voice"] = "on"
    ears = Ears(printer, keeps_sound=options.out is not None)
    separator = "&" if "?" in options.url else "?"
    async with connect(f"{options.url}{separator}{urlencode(query)}", max_size=1 << 24) as socket:
        listening = asyncio.create_task(ears.listen(socket))
        reporting = asyncio.create_task(keep_reporting(socket, ears.player))
        speaking = asyncio.create_task(_speak(socket, ears, recordings, rate, options, sleep))
        try:
            await asyncio.wait({listening, speaking}, return_when=asyncio.FIRST_COMPLETED)
            if speaking.done() and not isinstance(speaking.exception(), websockets.ConnectionClosed):
                speaking.result()
            else:
                await listening  # the server closed; what it said last is why
        finally:
            for task in (listening, reporting, speaking):
                task.cancel()
            await asyncio.gather(listening, reporting, speaking, return_exceptions=True)
    if options.out is not None:
        ears.save(options.out)
    return _status(
        ears.turns, socket, printer, is_finished=not speaking.cancelled() and speaking.exception() is None
    )


async def _speak(
    socket: ClientConnection,
    ears: Ears,
    recordings: Sequence[Samples],
    rate: int,
    options: TalkOptions,
    sleep: Sleep,
) -> None:
    if options.instructions is not None:
        await socket.send(json.dumps({"type": "session.update", "instructions": options.instructions}))
    if not recordings:
        async for chunk in microphone(rate):
            await socket.send(chunk)
    speaker = Speaker(socket, rate, sleep)
    for samples in recordings:
        await speak_turn(socket, speaker, ears, chunks(samples, rate), options)


def _status(turns: Turns, socket: ClientConnection, printer: Printer, is_finished: bool) -> int:
    error = turns.error
    if error is not None and error.get("status") == 503:
        retry_ms = error.get("retry_after_ms")
        hint = "" if retry_ms is None else f" (retry after {retry_ms / 1000:.1f} s)"
        printer.problem(f"refused: {error.get('message')}{hint}")
        return REFUSED if error.get("code") == "at_capacity" else FAILED
    if error is not None:
        printer.problem(f"{error.get('code')}: {error.get('message')}")
        return FAILED
    if is_finished:
        return ANSWERED
    printer.problem(
        f"the server closed the session: {socket.close_code} {socket.close_reason or ''}".rstrip()
    )
    return FAILED


def main(options: TalkOptions, files: Sequence[Path], printer: Printer) -> int:
    """Run `converse`, with every expected failure as one sentence and a status."""
    try:
        return asyncio.run(converse(options, files, printer))
    except KeyboardInterrupt:
        return ANSWERED
    except ClientError as error:
        printer.problem(str(error))
    except (OSError, websockets.WebSocketException, TimeoutError) as error:
        printer.problem(f"cannot talk to {options.url}: {error}")
    return FAILED
