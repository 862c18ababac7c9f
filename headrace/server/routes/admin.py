"""POST /reset_prefix_cache"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.server.errors import JSON, ApiError
from headrace.server.state import serving

router = APIRouter()


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Forget every cached prefix. 409 if prefix caching is disabled."""
    state = serving(request)
    state.check_ready()
    if not await state.llm.reset_prefix_cache():
        message = "prefix caching is disabled (--no-enable-prefix-caching): there is nothing to reset"
        raise ApiError(409, message, code="prefix_caching_disabled")
    return JSON({"reset": True})
