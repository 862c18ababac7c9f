"""Answers request bodies without HTTP, for the lines of a batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from headrace.errors import EngineDeadError, EngineError, RequestError, unsupported
from headrace.server.answers import AnswerRoute
from headrace.server.errors import ApiError, api_error
from headrace.server.routes.chat import chat_completions
from headrace.server.routes.completions import completions
from headrace.server.routes.messages import messages
from headrace.server.routes.responses import responses
from headrace.server.sse import collected
from headrace.server.state import Serving

_ROUTES: dict[str, AnswerRoute[Any]] = {route.url: route for route in (chat_completions, completions, responses, messages)}


class BatchAnswer(NamedTuple):
    """The response that POST would have sent."""

    status: int
    request_id: str
    body: dict[str, Any]

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens."""
        usage = self.body.get("usage") or {}
        return int(usage.get("completion_tokens", usage.get("output_tokens", 0)))


async def answered(state: Serving, url: str, body: dict[str, Any]) -> BatchAnswer:
    """The answer to one body, errors of the request included.

    Raises:
        EngineDeadError: the engine died under it.
    """
    route = _ROUTES[url]
    request_id = route.new_id()
    try:
        if body.get("stream"):
            raise unsupported("stream", "stream: a batch has no streams")
        generation, answer = await route.begun(state, {k: v for k, v in body.items() if v is not None}, request_id)
        whole = await collected(generation, answer)
        # Logprobs are encoded already.
        return BatchAnswer(200, request_id, msgspec.json.decode(msgspec.json.encode(whole)))
    except EngineDeadError:
        raise
    except (ApiError, RequestError, EngineError) as error:
        known = api_error(error, state.settings.retry_after)
        return BatchAnswer(known.status, request_id, known.messages_body(request_id) if "messages" in url else known.body)
