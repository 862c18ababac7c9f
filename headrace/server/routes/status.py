"""GET /health, /live, /ping, /version, /metrics: for operators, without an API key."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

import headrace
from headrace.metrics.prometheus import CONTENT_TYPE
from headrace.server.errors import JSON
from headrace.server.state import serving

router = APIRouter()


@router.get("/health")
@router.get("/ping")
@router.post("/ping")
async def health(request: Request) -> Response:
    """200 if requests are served; else 503 with the reason."""
    serving(request).check_ready()
    return JSON({"status": "ok"})


@router.get("/live")
async def live(request: Request) -> Response:
    """200 while the server runs, loads or restarts its engine; 503 with the reason once the engine stays down."""
    serving(request).check_live()
    return JSON({"status": "ok"})


@router.get("/version")
async def version() -> Response:
    return JSON({"version": headrace.__version__})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    return Response(serving(request).metrics.render(), media_type=CONTENT_TYPE)
