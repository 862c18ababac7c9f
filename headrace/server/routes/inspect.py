"""GET /v1/inspect/{request_id}: how the prompt of a recent request attended."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.server.errors import JSON, ApiError, shown
from headrace.server.state import serving

router = APIRouter()


@router.get("/v1/inspect/{request_id}")
async def inspect(request: Request) -> Response:
    """Density and head types of one of the last requests whose prompts attended sparsely. The id is that of its answer."""
    state, request_id = serving(request), request.path_params["request_id"]
    state.check_ready()
    report = state.reports.get(request_id)
    if report is None:
        message = f"no recent request {shown(request_id, 128)!r} has a prompt that attended sparsely"
        raise ApiError(404, message, param="request_id", code="not_found")
    return JSON({"id": request_id, "object": "attention_report", **msgspec.to_builtins(report)})
