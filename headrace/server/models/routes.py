"""Routes about a server of several models: GET /v1/models, /health, /ready, /live, /ping, /metrics, /api/tags, /api/ps"""

from __future__ import annotations

import math
import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.metrics.prometheus import CONTENT_TYPE
from headrace.server.errors import JSON
from headrace.server.models.host import ModelHost
from headrace.server.models.hosted import HostedModel
from headrace.server.routes.models import cards, planned_card
from headrace.server.routes.ollama import NEVER, running, tag, timestamp

router = APIRouter(include_in_schema=False)


def _host(request: Request) -> ModelHost:
    host: ModelHost = request.app.state.serving
    return host


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The names under which models are served, each with its state: loaded, loading, idle or unloading."""
    host = _host(request)
    await host.until_planned()
    return JSON({"object": "list", "data": [card for model in host.table.models for card in _cards(host, model)]})


@router.get("/v1/models/{name:path}")
async def model(request: Request) -> Response:
    """One of them."""
    host, name = _host(request), request.path_params["name"]
    await host.until_planned()
    every = _cards(host, host.table.find(name))
    return JSON(next((card for card in every if card["id"] == name), every[0] | {"id": name}))


def _cards(host: ModelHost, model: HostedModel) -> list[dict[str, Any]]:
    state: dict[str, Any] = {"state": model.state}
    if model.failure:
        state["failure"] = model.failure
    if model.state == "loaded":
        return [card | state for card in cards(model.serving)]
    if model.info is None:
        return []
    return [planned_card(name, host.created, model.info) | state for name in model.settings.served_model_names]


@router.get("/health")
@router.get("/ping")
@router.post("/ping")
@router.get("/ready")
async def health(request: Request) -> Response:
    """200 while requests are taken, else 503. Models are loaded for requests, so that none need be in memory."""
    host = _host(request)
    host.check_ready()
    loaded = sum(model.state == "loaded" for model in host.table.models)
    return JSON({"status": "ok", "models": {"loaded": loaded, "total": len(host.table.models)}})


@router.get("/live")
async def live() -> Response:
    """200 while the server runs."""
    return JSON({"status": "ok"})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus' text format. What is about one model has the label model_name."""
    return Response(_host(request).metrics.render(), media_type=CONTENT_TYPE)


@router.get("/api/tags")
async def tags(request: Request) -> Response:
    """The names under which models are served."""
    host = _host(request)
    await host.until_planned()
    found = [
        tag(name, model.info, host.created, gguf=model.gguf)
        for model in host.table.models
        for name in model.settings.served_model_names
        if model.info is not None
    ]
    return JSON({"models": found})


@router.get("/api/ps")
async def loaded(request: Request) -> Response:
    """The models that are loaded, and when each is unloaded if no request comes."""
    host = _host(request)
    await host.until_planned()
    loaded = [model for model in host.table.models if model.state == "loaded"]
    found = [
        running(name, model.serving.llm.info, _expires_at(model), gguf=model.gguf)
        for model in loaded
        for name in model.settings.served_model_names
    ]
    return JSON({"models": found})


def _expires_at(model: HostedModel) -> str:
    left = model.expires_at - time.monotonic()
    return NEVER if left == math.inf else timestamp(time.time() + left)
