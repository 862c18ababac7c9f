"""POST /v1/chat/completions/render, /v1/completions/render: bodies of /inference/v1/generate in place of answers."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.core.request import Request as EngineRequest
from headrace.errors import unsupported
from headrace.server.answers import AnswerRoute
from headrace.server.body import caller
from headrace.server.errors import JSON
from headrace.server.generation import cancel_on_disconnect
from headrace.server.request import posts
from headrace.server.routes.chat import chat_completions
from headrace.server.routes.completions import completions
from headrace.server.schema import ChatBody, CompletionBody, GenerationBody
from headrace.server.state import Serving

router = APIRouter()


@posts(router, "/v1/chat/completions/render", kind=ChatBody, endpoint="chat")
async def render_chat(request: Request, state: Serving, body: ChatBody) -> Response:
    """The tokens and sampling parameters of a chat request, as a body of /inference/v1/generate."""
    (rendered,) = await _rendered(request, state, body, chat_completions)
    return JSON(rendered)


@posts(router, "/v1/completions/render", kind=CompletionBody, endpoint="completions")
async def render_completions(request: Request, state: Serving, body: CompletionBody) -> Response:
    """The tokens and sampling parameters of each prompt, as bodies of /inference/v1/generate."""
    return JSON(await _rendered(request, state, body, completions))


async def _rendered(request: Request, state: Serving, body: GenerationBody, route: AnswerRoute[Any]) -> list[dict[str, Any]]:
    built = route.build(state, body, route.new_id(), caller(request))
    generation, _ = await cancel_on_disconnect(state, request.receive, built)
    try:
        return [_body(each, state.model.called(body.model)) for each in generation.requests]
    finally:
        await generation.aclose()


def _body(request: EngineRequest, model: str) -> dict[str, Any]:
    """Raises: RequestError: what the request asks for is more than tokens and parameters."""
    if request.media:
        raise unsupported("messages", "messages with media cannot be rendered: /inference/v1/generate takes tokens alone")
    if request.constraint is not None:
        kind = request.constraint.kind
        name = kind if kind in ("tools", "thinking_token_budget") else "structured_outputs"
        raise unsupported(name, f"a request with {name} cannot be rendered: send it to the route itself")
    return {
        "request_id": request.request_id,
        "model": model,
        "token_ids": request.prompt_token_ids,
        "features": None,
        "sampling_params": msgspec.to_builtins(request.sampling) | {"max_tokens": request.max_tokens},
        "cache_salt": request.cache_salt,
        "priority": request.priority,
        "stream": False,
    }
