"""Reads and validates request bodies."""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import Request
from pydantic import ValidationError

from headrace.server.agents import without_extras
from headrace.server.body import json_object
from headrace.server.errors import validation_error
from headrace.server.fields import Endpoint, applied_fields
from headrace.server.middleware import TENANT
from headrace.server.schema import RequestBody, SampledBody
from headrace.server.state import Serving

B = TypeVar("B", bound=RequestBody)


async def checked_body(request: Request, serving: Serving, kind: type[B], endpoint: Endpoint | None = None) -> B:
    """Reads and checks the body, against the table of fields where the endpoint is one of OpenAI's.

    Raises:
        ApiError: 503 while the engine does not serve; else 413 or 415, naming what is wrong, or 503 for want of memory.
        RequestError: the body is not what the endpoint takes.
    """
    serving.check_ready()
    fields = await json_object(request, serving.settings, serving.bodies, serving.max_json_values)
    if endpoint is not None:
        fields = await without_extras(request, serving, endpoint, fields)
    return parsed_body(fields, kind, endpoint)


def parsed_body(fields: dict[str, Any], kind: type[B], endpoint: Endpoint | None = None) -> B:
    """Raises: RequestError, naming what is wrong."""
    if endpoint is not None:
        fields = applied_fields(endpoint, fields)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise validation_error(error) from None


def tenant(request: Request) -> str:
    """Whose request it is: its API key's; empty where there are no keys."""
    return str(request.scope.get(TENANT, ""))


def body_schema(kind: type[RequestBody]) -> dict[str, Any]:
    """The body's entry in /openapi.json, which FastAPI cannot derive because the routes read the body themselves."""
    schema = kind.model_json_schema()
    if issubclass(kind, SampledBody):
        schema["properties"] |= kind.sampling_schema()
    inlined = _inline(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inlined}}}}


def _inline(node: Any, definitions: dict[str, Any]) -> Any:
    """Puts definitions in the place of references, which would point outside of the document's part."""
    if isinstance(node, list):
        return [_inline(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inline(definitions[node["$ref"].rpartition("/")[2]], definitions)
    return {key: _inline(value, definitions) for key, value in node.items()}
