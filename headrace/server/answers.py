"""Endpoints that answer a body with a generation, over HTTP and for the lines of a batch."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.options import Endpoint
from headrace.server.body import Caller, caller
from headrace.server.generation import Generation, cancel_on_disconnect
from headrace.server.request import parsed_body, posts
from headrace.server.schema import OllamaBody, SampledBody
from headrace.server.sse import Answer, respond
from headrace.server.state import Serving

B = TypeVar("B", bound=SampledBody | OllamaBody)
Begun = tuple[Generation, Answer]
_SESSION_HEADERS = ("x-session-id", "x-smg-routing-key")
"""Headers that name the session of a request; the second is SGLang's router's."""


@dataclasses.dataclass(frozen=True)
class AnswerRoute(Generic[B]):
    url: str
    prefix: str
    """Prefix of the ids of answers."""
    kind: type[B]
    endpoint: Endpoint | None
    """None: the body has no fields but its own."""
    build: Callable[[Serving, B, str, Caller], Awaitable[Begun]]

    async def answer(self, request: Request, state: Serving, body: B) -> Response:
        """The answer to a checked body."""
        request_id = request.scope["headrace.engine_id"] = self.new_id()
        # A client that leaves takes its work out of the queues of threads and processes.
        built = self.build(state, body, request_id, caller(request))
        generation, answer = await cancel_on_disconnect(state, request.receive, built)
        # Anthropic's bodies have no user.
        named = (request.headers.get(name) for name in _SESSION_HEADERS)
        if session := next(filter(None, named), None) or getattr(body, "user", None):
            generation.of_session(session)
        stream = body.stream
        del body  # its content is in the generation, which may take long
        version = state.weight_version
        response = await respond(request, state, generation, answer, stream=stream)
        if state.settings.enable_rl_api:
            response.headers["X-Weight-Version-Start"] = quote(version, safe="/:@+ ")
        return response

    async def begun(self, state: Serving, fields: dict[str, Any], request_id: str) -> Begun:
        """Begins the answer to a body that came without HTTP."""
        return await self.build(state, parsed_body(fields, self.kind, self.endpoint), request_id, Caller())

    def new_id(self) -> str:
        return f"{self.prefix}{uuid.uuid4().hex}"


def answers(
    router: APIRouter, url: str, prefix: str, kind: type[B], endpoint: Endpoint, *others: str
) -> Callable[..., AnswerRoute[B]]:
    """Decorates what begins the generation of a checked body, and makes it answer POST, at ``url`` and at others.

    The function takes the server's state, the body, the id of the answer and who sent the request. It
    raises ApiError and RequestError, naming the field at fault.
    """

    def decorate(build: Callable[[Serving, B, str, Caller], Awaitable[Begun]]) -> AnswerRoute[B]:
        route = AnswerRoute(url, prefix, kind, endpoint, build)
        posts(router, url, *others, kind=kind, endpoint=endpoint, like=build)(route.answer)
        return route

    return decorate
