"""GET /v1/models, GET /v1/models/{id}"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.server.errors import JSON
from headrace.server.state import Serving, serving

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The names under which the model is served."""
    state = serving(request)
    state.check_ready()
    return JSON({"object": "list", "data": [_card(state, name) for name in state.model.names]})


@router.get("/v1/models/{name:path}")
async def model(request: Request) -> Response:
    """One of them."""
    state, name = serving(request), request.path_params["name"]
    state.check_ready()
    state.model.check_name(name)
    return JSON(_card(state, name))


def _card(state: Serving, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "headrace",
        "root": state.llm.info.model,
        "max_model_len": state.model.max_model_len,
        "default_sampling_params": state.model.default_sampling_params,
    }
