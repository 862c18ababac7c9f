"""POST /reset_prefix_cache, /replicas/NUMBER/drain and /replicas/NUMBER/resume"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.errors import RequestError
from headrace.processes.replicas import ReplicaSet
from headrace.server.errors import JSON, ApiError, shown
from headrace.server.state import ready, serving

router = APIRouter()


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Forget every cached prefix. 409 if prefix caching is disabled."""
    state = ready(request)
    if not await state.llm.reset_prefix_cache():
        message = "prefix caching is disabled (--no-enable-prefix-caching): there is nothing to reset"
        raise ApiError(409, message, code="prefix_caching_disabled")
    return JSON({"reset": True})


def _replica(request: Request) -> tuple[ReplicaSet, int]:
    """The replica that the path names. Raises: ApiError 404: there is none."""
    replicas, number = serving(request).llm.replicas, request.path_params["number"]
    if replicas is None or number not in map(str, range(len(replicas.status()))):
        raise ApiError(404, f"there is no replica {shown(number, 16)}", param="replica", code="replica_not_found")
    return replicas, int(number)


@router.post("/replicas/{number}/drain")
async def drain_replica(request: Request) -> Response:
    """Send a replica no more requests. Answered once those in flight there have ended; 409 if it is the last that serves."""
    replicas, number = _replica(request)
    try:
        await replicas.drain(number)
    except RequestError as error:
        raise ApiError(409, error.message, param=error.param, code="last_replica") from None
    return JSON({"replica": number, "drained": True})


@router.post("/replicas/{number}/resume")
async def resume_replica(request: Request) -> Response:
    """Send a drained replica requests again."""
    replicas, number = _replica(request)
    replicas.resume(number)
    return JSON({"replica": number, "drained": False})
