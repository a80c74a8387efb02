"""`/v1/stream`: one socket, one session. Reads, calls the session, writes; decides nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from dataclasses import replace

from fastapi import APIRouter, WebSocket
from starlette.datastructures import QueryParams
from starlette.websockets import WebSocketDisconnect, WebSocketState

from app.auth import ApiKey
from app.connection import hand_over_audio
from app.gate import Refusal
from app.inbox import Inbox
from app.logs import WordLog
from app.outbox import Outbox
from app.service import Service
from engine.audio.resample import MAX_RATE, MIN_RATE
from engine.config import SessionConfig
from engine.errors import Leaving, NotUnderstood, SessionError, SlowReader, Unavailable
from engine.outputs import Close, Sound
from engine.refusals import turn_mode_refused
from engine.session import Session
from engine.types import TurnMode

log = logging.getLogger(__name__)
router = APIRouter()

SEND_LIMIT_S = 10.0  # a write that takes longer: the client does not read


@router.websocket("/v1/stream")
async def stream(socket: WebSocket) -> None:
    service: Service = socket.app.state.service
    await socket.accept()
    try:
        key = await service.door.identify(socket)
        with service.door.place(key):
            config = _config_of(socket, service)
            permit = service.gate.enter()
            if isinstance(permit, Refusal):
                raise _refused(permit)
            with permit:
                await _serve(socket, service, config, key)
    except SessionError as error:
        await _close(socket, error)
    except WebSocketDisconnect:
        pass  # it left before it said who it is


async def _serve(socket: WebSocket, service: Service, config: SessionConfig, key: ApiKey | None) -> None:
    session = Session(uuid.uuid4().hex[:16], service.family, config, time.monotonic())
    outbox = Outbox()
    deliver = WordLog(session.id, outbox.put) if service.settings.log_words else outbox.put
    service.conductor.open(session, deliver)
    about = {"session": session.id, "key": key.name if key else None}
    log.info("session %s opened by %s", session.id, about["key"] or "anyone", extra=about)
    try:
        await _converse(socket, session, outbox, service)
    finally:
        # The engine frees the session before anyone else can be given its permit.
        service.conductor.end(session)
        log.info("session %s ended: %d misses", session.id, session.num_misses, extra=about)


async def _converse(socket: WebSocket, session: Session, outbox: Outbox, service: Service) -> None:
    """Read and write until either side ends."""
    reader = asyncio.create_task(_read(socket, Inbox(session, outbox, service), outbox))
    writer = asyncio.create_task(_write(socket, outbox))
    try:
        done, _ = await asyncio.wait({reader, writer}, return_when=asyncio.FIRST_COMPLETED)
        if reader in done and outbox.is_closed:
            # The close is on its way out: let it.
            await asyncio.wait({writer}, timeout=SEND_LIMIT_S)
    finally:
        for task in (reader, writer):
            task.cancel()
        results = await asyncio.gather(reader, writer, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception) and not isinstance(result, WebSocketDisconnect):
            log.error("session %s: %r", session.id, result, exc_info=result)


async def _read(socket: WebSocket, inbox: Inbox, outbox: Outbox) -> None:
    hand_over_audio(socket.scope, inbox.on_audio)
    while not outbox.is_closed:
        message = await socket.receive()
        if message["type"] == "websocket.disconnect":
            return
        if (data := message.get("bytes")) is not None:
            inbox.on_audio(data)
        elif (text := message.get("text")) is not None:
            inbox.on_text(text)


async def _write(socket: WebSocket, outbox: Outbox) -> None:
    """Write what the session says, until it says that it is over."""
    while True:
        item = await outbox.get()
        if isinstance(item, Close):
            await _close(socket, item.error)
            return
        try:
            async with asyncio.timeout(SEND_LIMIT_S):
                if isinstance(item, Sound):
                    await socket.send_text(item.event.model_dump_json())
                    await socket.send_bytes(item.pcm)
                else:
                    await socket.send_text(item.model_dump_json())
        except TimeoutError:
            await _close(socket, SlowReader("The client does not read what it is sent."))
            return
        except RuntimeError:
            return  # the connection failed (text that is not UTF-8, say) before the reader heard of it


async def _close(socket: WebSocket, error: SessionError) -> None:
    """The error event, then the close frame with code and reason. The peer may be gone, or not reading."""
    with contextlib.suppress(WebSocketDisconnect, TimeoutError, RuntimeError):
        async with asyncio.timeout(SEND_LIMIT_S):
            if socket.application_state is WebSocketState.CONNECTED:
                await socket.send_text(error.event().model_dump_json())
                await socket.close(error.close_code, error.close_reason())


def _refused(refusal: Refusal) -> SessionError:
    kind = Leaving if refusal.code == "draining" else Unavailable
    return kind(refusal.message, code=refusal.code, retry_after_ms=refusal.retry_after_ms)


def _config_of(socket: WebSocket, service: Service) -> SessionConfig:
    """The session's config from the URL's query; raises NotUnderstood with what to change."""
    defaults = service.session_config()
    query = socket.query_params
    config = replace(
        defaults,
        sample_rate=_number(query, "sample_rate", defaults.sample_rate, MIN_RATE, MAX_RATE),
        max_tokens=_number(query, "max_tokens", defaults.max_tokens, 1, defaults.max_tokens_ceiling),
        is_aloud=_switch(query, "voice", defaults.is_aloud),
    )
    if (wanted := query.get("turn")) is None:
        return config
    try:
        mode = TurnMode(wanted)
    except ValueError:
        raise NotUnderstood(f"turn={wanted}: choose one of {', '.join(TurnMode)}.") from None
    if mode not in service.family.info.turn_modes:
        raise NotUnderstood(turn_mode_refused(service.family, mode).message)
    return replace(config, mode=mode)


def _switch(query: QueryParams, name: str, default: bool) -> bool:
    text = query.get(name)
    if text not in (None, "on", "off"):
        raise NotUnderstood(f"{name}={text}: must be on or off.")
    return default if text is None else text == "on"


def _number(query: QueryParams, name: str, default: int, low: int, high: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise NotUnderstood(f"{name}={text}: must be a whole number from {low} to {high}.")
    return value
