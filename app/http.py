"""`/health`, `/capacity` and `/metrics`: for people with curl, balancers and Prometheus.

`/health` needs no key, since balancers have none; what tells about load does, where keys are set.
"""

from __future__ import annotations

import math
import time

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from prometheus_client.exposition import choose_encoder
from pydantic import BaseModel

from app.service import Service
from engine.conductor import Phase

router = APIRouter()

OPENMETRICS = "application/openmetrics-text"


class Health(BaseModel):
    status: Phase
    model: str
    uptime_s: float


class Lateness(BaseModel):
    """Of the last half minute; null where nobody had work."""

    p50_ms: float | None
    p99_ms: float | None
    samples: int


class KvCache(BaseModel):
    blocks_used: int
    blocks_total: int
    used_fraction: float


class Capacity(BaseModel):
    """Being full is not being down: free 0 is an ordinary answer."""

    status: Phase
    model: str
    checkpoint: str | None  # NAME@COMMIT on the Hub, or a directory; null where the model is embedded
    cap: int  # sessions that may be in flight now
    active: int
    free: int
    budget_ms: int
    target_ms: int  # the median lateness that admission stays under
    lateness: Lateness
    kv_cache: KvCache | None  # null while no engine runs
    misses: int  # ticks that were still running when their session was due again
    admitted: int
    refused: dict[str, int]  # by reason
    uptime_s: float


def _service(request: Request) -> Service:
    return request.app.state.service


async def require_key(request: Request) -> None:
    if not _service(request).door.lets_in(request):
        message = "This server needs an API key: send 'Authorization: Bearer KEY'."
        raise HTTPException(401, message, headers={"WWW-Authenticate": "Bearer"})


@router.get("/health", responses={503: {"model": Health}})
async def health(request: Request, response: Response) -> Health:
    """200 when sessions can be opened, even if all places are taken; 503 otherwise."""
    service = _service(request)
    phase = service.conductor.phase
    response.status_code = 200 if phase is Phase.READY else 503
    return Health(status=phase, model=service.family.info.name, uptime_s=_uptime(service))


@router.get(
    "/capacity",
    responses={401: {"description": "No known API key"}, 503: {"model": Capacity}},
    dependencies=[Depends(require_key)],
)
async def capacity(request: Request, response: Response, require: int = 0) -> Capacity:
    """`?require=N` answers 503 with Retry-After unless N more sessions would be admitted."""
    service = _service(request)
    gate = service.gate
    if gate.free < require:
        response.status_code = 503
        response.headers["Retry-After"] = str(math.ceil(gate.retry_after_ms() / 1000))
    recent = service.limit.recent(time.monotonic())
    return Capacity(
        status=service.conductor.phase,
        model=service.family.info.name,
        checkpoint=service.family.info.checkpoint,
        cap=gate.cap,
        active=gate.in_flight,
        free=gate.free,
        budget_ms=round(1000 * service.budget_s),
        target_ms=round(1000 * service.limit.target_s),
        lateness=Lateness(p50_ms=_ms(recent.p50_s), p99_ms=_ms(recent.p99_s), samples=recent.num_samples),
        kv_cache=_kv_cache(service),
        misses=service.num_misses,
        admitted=gate.num_admitted,
        refused=dict(gate.refused),
        uptime_s=_uptime(service),
    )


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}, 401: {"description": "No known API key"}},
    dependencies=[Depends(require_key)],
)
async def metrics(request: Request) -> Response:
    """Prometheus' text format, or OpenMetrics where asked for."""
    # The header's versions are not handed on: the library raises on one that is no number.
    wants_openmetrics = OPENMETRICS in request.headers.get("accept", "")
    encode, content_type = choose_encoder(f"{OPENMETRICS}; version=1.0.0" if wants_openmetrics else "")
    return Response(encode(_service(request).metrics.registry), headers={"Content-Type": content_type})


def _kv_cache(service: Service) -> KvCache | None:
    engine = service.conductor.engine
    if engine is None:
        return None
    used, total = engine.stats().kv_blocks_used, engine.limits.num_kv_blocks
    return KvCache(blocks_used=used, blocks_total=total, used_fraction=round(used / total, 4))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 1)


def _uptime(service: Service) -> float:
    return round(time.monotonic() - service.started_at, 1)
