"""Reads and validates request bodies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.errors import RequestError, did_you_mean, missing, unknown
from headrace.options import Endpoint, check_value, options
from headrace.server.agents import without_extras
from headrace.server.body import json_object
from headrace.server.errors import shown
from headrace.server.fields import applied_fields
from headrace.server.generation import cancel_on_disconnect
from headrace.server.schema import RequestBody, applied_options
from headrace.server.state import Serving, serving

B = TypeVar("B", bound=RequestBody)


Handler = Callable[[Request, Serving, B], Awaitable[Response]]


def posts(
    router: APIRouter, *urls: str, kind: type[B], endpoint: Endpoint | None = None, like: Callable[..., object] | None = None
) -> Callable[[Handler[B]], Handler[B]]:
    """Decorates a function that answers POST, and gives it the server's state and the checked body. The route has the name and
    docstring of ``like``; None: of this function."""

    def decorate(handle: Handler[B]) -> Handler[B]:
        async def post(request: Request) -> Response:
            state = serving(request)
            return await handle(request, state, await checked_body(request, state, kind, endpoint))

        post.__name__, post.__doc__ = (like or handle).__name__, (like or handle).__doc__
        for url in reversed(urls):
            router.post(url, openapi_extra=body_schema(kind, endpoint))(post)
        return handle

    return decorate


async def checked_body(request: Request, serving: Serving, kind: type[B], endpoint: Endpoint | None = None) -> B:
    """Reads and checks the body, against the table of fields where the endpoint is one of OpenAI's.

    Raises:
        ApiError: 503 if the engine does not come to serve; else 413 or 415, naming what is wrong, or 503 for lack of memory.
        RequestError: the body is not what the endpoint takes.
    """
    await serving.until_ready()
    fields = await json_object(request, serving.settings, serving.bodies, serving.max_json_values)
    if endpoint is not None:
        fields = await cancel_on_disconnect(serving, request.receive, without_extras(request, serving, endpoint, fields))
    return parsed_body(fields, kind, endpoint)


def parsed_body(fields: dict[str, Any], kind: type[B], endpoint: Endpoint | None = None) -> B:
    """Raises: RequestError, naming what is wrong."""
    declared = options(kind)
    if endpoint is not None:
        fields = applied_fields(endpoint, fields)
    elif (extra := next((name for name in fields if name not in declared), None)) is not None:
        raise unknown(shown(extra), did_you_mean(shown(extra), declared))
    if absent := next((name for name, option in declared.items() if option.required and name not in fields), None):
        raise missing(absent)
    own = {name: declared[name].from_json(value) for name, value in fields.items() if name in declared}
    for name, value in own.items():
        check_value(declared[name], value, RequestError)
    return trusted_body(fields | own, kind)


def trusted_body(fields: Mapping[str, Any], kind: type[B]) -> B:
    """A body of fields that are checked. Those that are not its own are sampling parameters."""
    own = {name: value for name, value in fields.items() if name in options(kind)}
    sampling = {name: value for name, value in fields.items() if name not in own}
    return kind(**own, **({"sampling": sampling} if sampling else {}))


def body_schema(kind: type[RequestBody], endpoint: Endpoint | None = None) -> dict[str, Any]:
    """The body's entry in /openapi.json, which FastAPI cannot derive because the routes read the body themselves."""
    declared = options(kind) if endpoint is None else applied_options(endpoint)
    properties = {name: option.json_schema() for name, option in declared.items()}
    required = [name for name, option in declared.items() if option.required]
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
