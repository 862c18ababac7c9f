"""Answers request bodies without HTTP, for the lines of a batch."""

from __future__ import annotations

import uuid
from typing import Any, NamedTuple

import msgspec

from headrace.errors import EngineDeadError, EngineError, RequestError
from headrace.server.errors import ApiError, api_error
from headrace.server.generation import Generation
from headrace.server.request import parsed_body
from headrace.server.routes.chat import ChatAnswer, chat_generation
from headrace.server.routes.completions import completion_answer
from headrace.server.routes.messages import messages_answer
from headrace.server.routes.responses import responses_answer
from headrace.server.schema import ChatBody, CompletionBody, MessagesBody, ResponsesBody
from headrace.server.sse import Answer, collected
from headrace.server.state import Serving

_PREFIX = {"/v1/chat/completions": "chatcmpl-", "/v1/completions": "cmpl-", "/v1/responses": "resp_", "/v1/messages": "msg_"}
"""Of the ids of answers, by url."""


class BatchAnswer(NamedTuple):
    """What POST would have answered."""

    status: int
    request_id: str
    body: dict[str, Any]

    @property
    def num_tokens(self) -> int:
        """How many were generated."""
        usage = self.body.get("usage") or {}
        return int(usage.get("completion_tokens", usage.get("output_tokens", 0)))


async def answered(state: Serving, url: str, body: dict[str, Any]) -> BatchAnswer:
    """The answer to one body, errors of the request included.

    Raises:
        EngineDeadError: the engine died under it.
    """
    request_id = f"{_PREFIX[url]}{uuid.uuid4().hex}"
    try:
        generation, answer = await _begun(state, url, {k: v for k, v in body.items() if v is not None}, request_id)
        whole = await collected(generation, answer)
        # Logprobs are encoded already.
        return BatchAnswer(200, request_id, msgspec.json.decode(msgspec.json.encode(whole)))
    except EngineDeadError:
        raise
    except (ApiError, RequestError, EngineError) as error:
        known = api_error(error, state.settings.retry_after)
        return BatchAnswer(known.status, request_id, known.messages_body(request_id) if "messages" in url else known.body)


async def _begun(state: Serving, url: str, body: dict[str, Any], request_id: str) -> tuple[Generation, Answer]:
    if body.get("stream"):
        raise ApiError(400, "stream: a batch has no streams", param="stream", code="unsupported_parameter")
    match url:
        case "/v1/chat/completions":
            chat = parsed_body(body, ChatBody, "chat")
            generation = await chat_generation(state, chat, request_id, tenant=None)
            return generation, ChatAnswer(chat, state, generation, request_id)
        case "/v1/completions":
            return await completion_answer(state, parsed_body(body, CompletionBody, "completions"), request_id)
        case "/v1/responses":
            return await responses_answer(state, parsed_body(body, ResponsesBody, "responses"), request_id, None)
        case _:
            return await messages_answer(state, parsed_body(body, MessagesBody, "messages"), request_id, None)
