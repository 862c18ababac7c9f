"""GET /v1/inspect and /v1/inspect/{request_id}: how the prompts of recent requests attended."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.outputs import AttentionReport
from headrace.server.errors import ApiError, shown
from headrace.server.request import tenant
from headrace.server.state import serving

router = APIRouter()


@router.get("/v1/inspect")
async def dump(request: Request) -> Response:
    """A line of JSON for each of the API key's last requests whose prompts attended sparsely: what the router decided."""
    state = serving(request)
    state.check_ready()
    lines = [_encoded(name, report) + b"\n" for name, report in state.reports(tenant(request)).items()]
    return Response(b"".join(lines), media_type="application/jsonl")


@router.get("/v1/inspect/{request_id}")
async def inspect(request: Request) -> Response:
    """Density and head types of one of the last requests whose prompts attended sparsely. The id is that of its answer."""
    state, request_id = serving(request), request.path_params["request_id"]
    state.check_ready()
    report = state.reports(tenant(request)).get(request_id)
    if report is None:
        message = f"no recent request {shown(request_id, 128)!r} has a prompt that attended sparsely"
        raise ApiError(404, message, param="request_id", code="not_found")
    return Response(_encoded(request_id, report), media_type="application/json")


def _encoded(request_id: str, report: AttentionReport) -> bytes:
    return msgspec.json.encode({"id": request_id, "object": "attention_report", **msgspec.to_builtins(report)})
