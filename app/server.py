"""Builds the application and runs it: load, rehearse, serve, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from app import http, logs, page, preflight, stream
from app.connection import Connection, HttpConnection
from app.service import Service, build
from app.settings import Settings, resolve
from engine.audio.speech import SpeechDetector
from engine.conductor import Conductor, Phase
from engine.config import SessionConfig
from engine.models import load_family, load_vad_file
from engine.models.null import NullFamily
from engine.models.prepare import PrepareError, progress_bar
from engine.null import NullEngine
from engine.rehearsal import rehearse
from engine.scheduler import MAX_BATCH
from engine.voice import load_voice

log = logging.getLogger(__name__)

MakeService = Callable[[], Service]
Rehearsal = Callable[[Conductor, SessionConfig], Awaitable[None]]


def make_app(
    make_service: MakeService, on_failure: Callable[[], None], rehearsal: Rehearsal = rehearse
) -> FastAPI:
    """The application over a service that is built on its event loop; ready when `rehearsal` succeeded.

    `on_failure` is called when nothing can be served any more.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service = app.state.service = make_service()
        # Sockets and /health answer while the model loads: a balancer must see "starting", not a closed port.
        tasks = [
            asyncio.create_task(_live(service, on_failure, rehearsal)),
            asyncio.create_task(service.metrics.pulse(service.conductor)),
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await service.conductor.close()

    app = FastAPI(title="Metronome", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.include_router(http.router)
    app.include_router(stream.router)
    app.include_router(page.make_router())
    return app


async def _live(service: Service, on_failure: Callable[[], None], rehearsal: Rehearsal) -> None:
    """Start, rehearse, beat; returns only when the server failed."""
    conductor = service.conductor
    try:
        await conductor.start()
        beat = asyncio.create_task(conductor.run())
        await rehearsal(conductor, service.session_config())
        if conductor.phase is Phase.STARTING:  # a signal may have come meanwhile
            conductor.phase = Phase.READY
            log.info("ready")
        await beat
    except Exception:
        log.exception("the server failed")
    conductor.phase = Phase.FAILED
    on_failure()


def rehearsal_on(device: str) -> Rehearsal:
    """On a GPU the largest batch that is heard at once rehearses too: kernels are compiled for its shape."""
    return functools.partial(rehearse, num_together=MAX_BATCH + 1 if device == "cuda" else 0)


class Server(uvicorn.Server):
    """uvicorn, but the first signal drains: sessions may end by themselves until the deadline."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, drain_s: float) -> None:
        super().__init__(config)
        self._app = app
        self._drain_s = drain_s
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        service: Service | None = getattr(self._app.state, "service", None)
        if service is None or self._draining is not None or service.conductor.phase is Phase.FAILED:
            super().handle_exit(sig, frame)
            return
        loop = service.conductor.loop
        loop.call_soon_threadsafe(self._begin_drain, service)

    def _begin_drain(self, service: Service) -> None:
        if self._draining is None:
            log.info("draining %d sessions, %g s at most", len(service.conductor.scheduler), self._drain_s)
            self._draining = asyncio.create_task(self._drain(service))

    async def _drain(self, service: Service) -> None:
        await service.conductor.drain(self._drain_s)
        await asyncio.sleep(0.2)  # the close frames are on their way
        self.should_exit = True  # not by `handle_exit`: that would raise the signal again, and it was obeyed


def run(settings: Settings) -> None:
    """Serve until a signal comes or the server fails; exits with status 1 in the second case."""
    settings = resolve(settings)
    logs.set_up(settings.log_level, settings.log_format)
    with contextlib.ExitStack() as stack:
        try:
            keyring = preflight.check(settings)
            stack.enter_context(preflight.only_one(settings))
            make_service = prepare(settings)
        except (preflight.StartError, PrepareError, ValueError) as error:
            print(f"metronome: {error}", file=sys.stderr)
            raise SystemExit(1) from None
        print(preflight.greeting(settings, keyring), flush=True)
        _serve(make_service, settings)


def _serve(make_service: MakeService, settings: Settings) -> None:
    # When the server failed, the process goes, and its supervisor starts it anew.
    app = make_app(make_service, lambda: setattr(server, "should_exit", True), rehearsal_on(settings.device))
    server = Server(uvicorn_config(app, settings), app, settings.drain_s)
    server.run()
    if app.state.service.conductor.phase is Phase.FAILED:
        raise SystemExit(1)


def uvicorn_config(app: FastAPI, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        http=functools.partial(HttpConnection, max_connections=settings.max_connections),  # pyright: ignore[reportArgumentType]
        ws=Connection,
        ws_max_size=4 * settings.session.max_message_bytes,  # over it no error event can be sent, only 1009
        ws_per_message_deflate=False,  # audio does not compress, and each connection would pay for trying
        ws_ping_interval=20,
        ws_ping_timeout=60,  # patient: a machine under load must not close healthy sessions
        timeout_graceful_shutdown=round(settings.close_s) + 1,
        ssl_certfile=settings.tls.cert,
        ssl_keyfile=settings.tls.key,
    )


def prepare(settings: Settings) -> MakeService:
    """Everything before the event loop: models on disk, family and detector loaded, the engine described."""
    with progress_bar() as report:
        detector = SpeechDetector(load_vad_file(settings.cache_dir, report))
        voice = load_voice(settings.voice.name)
        if settings.model == "null":
            return lambda: build(settings, NullFamily(), NullEngine, detector, voice)
        family = load_family(settings.model, settings.cache_dir, report, device=settings.device)
    # Here: the null model needs no vLLM.
    from engine.vllm.engine import VllmEngine
    from engine.vllm.environment import prepare_process
    from engine.vllm.settings import VllmSettings

    prepare_process(settings.device, settings.threads)
    kv_cache_gib = settings.engine.kv_cache_gib
    engine_settings = VllmSettings(
        device="cuda" if settings.device == "cuda" else "cpu",
        max_sessions=settings.max_sessions + 1,  # one more for the rehearsal, should the engine be rebuilt
        max_session_tokens=settings.engine.max_session_tokens,
        max_batch_tokens=settings.engine.max_batch_tokens,
        kv_cache_bytes=None if kv_cache_gib is None else round(kv_cache_gib * (1 << 30)),
        eager=settings.engine.eager,
        kv=settings.engine.kv,
        window_tokens=settings.engine.window_tokens,
        max_sink_tokens=settings.engine.max_sink_tokens,
        max_chunk_tokens=settings.engine.max_chunk_tokens,
        compaction_slack_tokens=settings.engine.compaction_slack_tokens,
        weights=settings.engine.weights,
        kv_dtype=settings.engine.kv_dtype,
    )
    return lambda: build(
        settings, family, lambda: VllmEngine(family.engine_recipe(), engine_settings), detector, voice
    )
