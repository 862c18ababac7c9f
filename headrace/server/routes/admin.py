"""POST /reset_prefix_cache"""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.server.errors import JSON, ApiError
from headrace.server.state import serving

router = APIRouter()


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Forgets every cached prefix. 409 while the engine cannot, because sequences use them."""
    state = serving(request)
    state.check_ready()
    if await state.llm.reset_prefix_cache() is False:
        raise ApiError(409, "the prefix cache is in use: try again when no request is running", code="prefix_cache_in_use")
    return JSON({"reset": True})
