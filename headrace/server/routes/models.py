"""GET /v1/models, GET /v1/models/{id}"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.engine.info import EngineInfo
from headrace.frontend.adapters import NamedAdapter
from headrace.server.errors import JSON
from headrace.server.state import Serving, described

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The names under which the model is served, and its adapters."""
    state = described(request)
    names = state.model.names
    found: dict[str, Any] = {"object": "list", "data": cards(state)}
    # Codex would use instructions that are not there in place of its own.
    if "client_version" in request.query_params and (instructions := state.codex_instructions) is not None:
        found["models"] = [_codex_card(state, name, instructions) for name in names]
    return JSON(found)


@router.get("/v1/models/{name:path}")
async def model(request: Request) -> Response:
    """One of them."""
    state, name = described(request), request.path_params["name"]
    adapter = state.adapter(name)
    if adapter is not None:
        return JSON(_adapter_card(state, state.llm.adapters.names.find(adapter.name)))
    return JSON(_card(state, name))


def cards(state: Serving) -> list[dict[str, Any]]:
    """The model under each of its names, and its adapters."""
    adapters = state.llm.adapters.names
    return [*(_card(state, name) for name in state.model.names), *(_adapter_card(state, one) for one in adapters)]


def planned_card(name: str, created: int, info: EngineInfo) -> dict[str, Any]:
    """A model that need not be loaded."""
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "headrace",
        "root": info.model,
        "max_model_len": info.max_model_len,
        "context_window": info.max_model_len,
        "max_output_tokens": info.max_model_len - 1,
    }


def _card(state: Serving, name: str) -> dict[str, Any]:
    defaults = state.model.default_sampling_params
    return planned_card(name, state.created, state.llm.info) | {"default_sampling_params": defaults}


def _adapter_card(state: Serving, adapter: NamedAdapter) -> dict[str, Any]:
    return _card(state, adapter.name) | {"parent": state.model.name, "root": adapter.path}


def _codex_card(state: Serving, name: str, instructions: str) -> dict[str, Any]:
    """The model as Codex reads it."""
    answers, window = state.llm.inputs.answers, state.model.max_model_len
    levels = answers.efforts.known() if answers is not None and answers.reasons else ()
    return {
        "slug": name,
        "display_name": name,
        "description": None,
        "default_reasoning_level": None,
        "supported_reasoning_levels": [{"effort": level, "description": level} for level in levels],
        "shell_type": "shell_command",
        "visibility": "list",
        "supported_in_api": True,
        "priority": 0,
        "base_instructions": instructions,
        "supports_reasoning_summaries": False,
        "support_verbosity": False,
        "default_verbosity": None,
        "apply_patch_tool_type": "freeform",
        "truncation_policy": {"mode": "tokens", "limit": max(1000, window // 16)},
        "supports_parallel_tool_calls": True,
        "experimental_supported_tools": [],
        "context_window": window,
        "auto_compact_token_limit": window * 9 // 10,
        "input_modalities": ["text", "image"] if state.llm.info.media is not None else ["text"],
    }
