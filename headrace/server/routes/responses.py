"""POST /v1/responses, and the responses that are stored"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.errors import RequestError, unsupported
from headrace.server.answers import Begun, answers
from headrace.server.body import Caller, caller
from headrace.server.errors import JSON, ApiError, shown
from headrace.server.prompts import need_tokenizer
from headrace.server.request import trusted_body
from headrace.server.routes.chat import chat_generation
from headrace.server.schema import ChatBody, ResponsesBody
from headrace.server.shape.responses import NAMES, NO_COMPACTION, ResponsesAnswer, conversation
from headrace.server.shape.turns import late_system, renamed
from headrace.server.state import Serving, serving
from headrace.server.store import Stored, StoredItem
from headrace.text.transcript import Transcript

router = APIRouter()
_MOST_ITEMS = 100


@answers(router, "/v1/responses", "resp_", ResponsesBody, "responses")
async def responses(state: Serving, body: ResponsesBody, response_id: str, caller: Caller) -> Begun:
    """Answers a conversation of items."""
    if body.store and not state.responses.on:
        raise unsupported("store", "store: this server keeps no responses (--no-responses-store)")
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream: true", "stream_options")
    owner = caller.tenant
    late = await late_system(state, caller.turn)
    with renamed(NAMES):
        read = await conversation(body, state, caller, late)
    with renamed(NAMES, tools=read.tools.places):
        chat = trusted_body(read.chat, ChatBody)
        generation = await chat_generation(
            state, chat, response_id, caller, grammars=read.tools.grammars, transcript=read.transcript
        )
    if not state.responses.on or body.store is False:
        return generation, ResponsesAnswer(body, state, generation, response_id, read, None)
    state.responses.begin(owner, response_id, read.earlier, read.input_items)
    generation.at_end(lambda: state.responses.abandon(owner, response_id))

    def keep(response: dict[str, Any], token_ids: list[int]) -> None:
        transcript = Transcript.of(need_tokenizer(state, "input"), generation.requests[0], token_ids)
        output = tuple(StoredItem.of(item) for item in response["output"])
        state.responses.finish(owner, response_id, msgspec.json.encode(response), output, transcript)

    return generation, ResponsesAnswer(body, state, generation, response_id, read, keep)


@router.post("/v1/responses/compact")
async def compact(request: Request) -> Response:
    """Refused: the server compacts no conversations."""
    raise unsupported("input", NO_COMPACTION)


@router.get("/v1/responses/{response_id}")
async def stored_response(request: Request) -> Response:
    """A response that was stored."""
    if request.query_params.get("stream", "false").lower() == "true":
        raise unsupported("stream", "stream: a stored response is sent whole")
    return JSON(msgspec.Raw(_stored(request).response))


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request) -> Response:
    """Forgets a response. Later ones of the conversation stay."""
    _stored(request)
    identity = request.path_params["response_id"]
    serving(request).responses.delete(caller(request).tenant, identity)
    return JSON({"id": identity, "object": "response", "deleted": True})


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request) -> Response:
    """Refused: there are no responses in the background."""
    _stored(request)
    message = "the response is not a background response; one that runs is cancelled by closing its connection"
    raise RequestError(message, "response_id")


@router.get("/v1/responses/{response_id}/input_items")
async def input_items(request: Request) -> Response:
    """The items of the request that a stored response answers, the last first."""
    query = request.query_params
    items = _stored(request).input_items
    order, limit = query.get("order", "desc"), query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise RequestError("order must be asc or desc", "order")
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit) <= _MOST_ITEMS:
        raise RequestError(f"limit must be an integer from 1 to {_MOST_ITEMS}", "limit")
    if order == "desc":
        items = items[::-1]
    if (after := query.get("after")) is not None:
        places = [index for index, item in enumerate(items) if item.id == after]
        if not places:
            raise ApiError(404, f"after: there is no item {shown(after)}", param="after", code="item_not_found")
        items = items[places[0] + 1 :]
    page = items[: int(limit)]
    ends = {"first_id": page[0].id if page else None, "last_id": page[-1].id if page else None}
    data = [msgspec.Raw(item.text) for item in page]
    return JSON({"object": "list", "data": data, **ends, "has_more": len(page) < len(items)})


def _stored(request: Request) -> Stored:
    identity = request.path_params["response_id"]
    entry = serving(request).responses.get(caller(request).tenant, identity)
    if entry is None:
        message = f"there is no response {shown(identity)}: it was not stored, or is forgotten"
        raise ApiError(404, message, param="response_id", code="response_not_found")
    return entry
