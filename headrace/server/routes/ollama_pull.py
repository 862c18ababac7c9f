"""POST /api/pull: downloads a model into the hub's cache, by Ollama's API. Other routes about files are refused by name."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from headrace.errors import ConfigError, RequestError, missing, unsupported
from headrace.host.child import ChildProcess, python
from headrace.server.body import json_object
from headrace.server.errors import JSON, ApiError
from headrace.server.request import body_schema, parsed_body
from headrace.server.routes.rl import admin
from headrace.server.schema import OllamaPullBody
from headrace.server.state import MAX_JSON_VALUES, ServerState
from headrace.sources.locate import HUB_NAME, locate
from headrace.sources.pull_worker import Pulled

router = APIRouter()

_MOST = 2
"""Downloads at once."""
_encode = msgspec.json.Encoder().encode


@router.post("/api/pull", openapi_extra=body_schema(OllamaPullBody))
async def pull(request: Request) -> Response:
    """Downloads a model of the hub, and reports the progress in lines of JSON unless stream is false."""
    server: ServerState = request.app.state.serving
    _check_allowed(server, request)
    body = parsed_body(await json_object(request, server.settings, server.bodies, MAX_JSON_VALUES), OllamaPullBody)
    if (model := body.model or body.name) is None:
        raise missing("model")
    if body.insecure:
        raise unsupported("insecure", "insecure may only be false: the hub is asked over HTTPS")
    _check_hub_name(model)
    if body.stream:
        return StreamingResponse(_lines(server, model), media_type="application/x-ndjson")
    last: dict[str, Any] = {}
    async for line in _reports(server, model):
        last = line
    return JSON(last, 200 if "error" not in last else 500)


def _check_allowed(server: ServerState, request: Request) -> None:
    """Raises: ApiError 403, or 503: enough is being downloaded."""
    if not server.settings.allow_pull:
        message = "this server downloads no models for clients: its operator may allow it (--allow-pull), or use headrace pull"
        raise ApiError(403, message, code="forbidden")
    admin(request)
    if server.num_pulls >= _MOST:
        raise ApiError(503, f"{_MOST} models are being downloaded", code="unavailable", headers={"Retry-After": "60"})


def _check_hub_name(model: str) -> None:
    """Raises: RequestError: the name is a path, or could be one."""
    try:
        path = locate(model)
    except ConfigError:
        path = None
    if path is not None or not HUB_NAME.fullmatch(model):
        raise RequestError("model must be a model of the hub, such as Qwen/Qwen3-0.6B or REPO:Q4_K_M", "model")


async def _lines(server: ServerState, model: str) -> AsyncIterator[bytes]:
    async for report in _reports(server, model):
        yield _encode(report) + b"\n"


async def _reports(server: ServerState, model: str) -> AsyncIterator[dict[str, Any]]:
    """Reports in Ollama's form. A client that leaves ends the download, which a later one continues."""
    server.num_pulls += 1
    child = ChildProcess(python("headrace.sources.pull_worker"), "the process that downloads a model", quiet=True)
    try:
        child.send(model.encode())
        yield {"status": "pulling manifest"}
        report = Pulled(0)
        while not report.done:
            report = msgspec.msgpack.decode(bytes(await asyncio.to_thread(child.receive)), type=Pulled)
            yield {"status": f"pulling {model}", "completed": report.nbytes}
        yield {"error": report.error} if report.error else {"status": "success"}
    except EOFError:
        yield {"error": "the process that downloads the model ended; the server's log says why"}
    finally:
        server.num_pulls -= 1
        child.kill()
        child.end()


_REFUSED = {
    "/api/create": "models are made of files outside of this server",
    "/api/copy": "a model has the names of --served-model-name and --model-alias",
    "/api/push": "this server uploads nothing",
}


@router.delete("/api/delete")
async def delete() -> Response:
    """Refused: files of a model may be in use."""
    raise ApiError(403, "this server removes no files: use headrace remove", code="forbidden")


@router.post("/api/create")
@router.post("/api/copy")
@router.post("/api/push")
async def unserved(request: Request) -> Response:
    """Refused."""
    path = request.url.path
    raise ApiError(403, f"{path} is not served: {_REFUSED[path]}", code="forbidden")
