"""Dispatch: hands each request to the app of the model that it names."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.errors import HeadraceError
from headrace.server.body import Body, check_content_type, decoded
from headrace.server.errors import JSON, api_error
from headrace.server.generation import cancel_on_disconnect
from headrace.server.models.host import ModelHost
from headrace.server.models.hosted import HostedModel
from headrace.server.models.routes import router
from headrace.server.routes import ollama, ollama_pull, page, status
from headrace.server.routes.ollama import description, planned_capabilities
from headrace.server.shape.ollama import duration, nothing_generated

_PARTS = router, page.router, ollama_pull.router
_OWN = frozenset(route.endpoint for part in _PARTS for route in part.routes if isinstance(route, APIRoute))
_ABOUT_THE_SERVER = _OWN | {status.version, ollama.version}
"""Endpoints that the server answers itself."""
_NO_JSON = frozenset({"/v1/features"})
"""Routes whose bodies are not JSON: the address names the model."""
_OLLAMA = "/api/"
_MAY_UNLOAD = {"/api/chat": True, "/api/generate": False}
"""Routes on which a request without a prompt may unload the model, and whether they are about conversations."""
_SHOW = "/api/show"
_EMPTY = (b"", b"null", b'""', b"[]")


class _Wanted(msgspec.Struct):
    """The fields of a body that choose the model, and by Ollama's API how long it stays. Others are skipped, and not built."""

    model: str | None = None
    name: str | None = None
    """Ollama's older name of model."""
    keep_alive: str | float | bool | None = None
    prompt: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    suffix: msgspec.Raw = msgspec.Raw(b"")
    images: msgspec.Raw = msgspec.Raw(b"")

    @property
    def empty(self) -> bool:
        return all(bytes(raw) in _EMPTY for raw in (self.prompt, self.messages, self.suffix, self.images))


class Dispatch:
    """Innermost middleware of a server of several models: API keys are checked, and nothing of the body is read yet.

    Reads the body within its limits, waits for the model that it names to be loaded, and calls the model's app with the same
    bytes. Routes that are unknown, or about the server, are passed on.
    """

    def __init__(self, app: ASGIApp, host: ModelHost, routers: Iterable[APIRouter]) -> None:
        """``routers``: of the app, in the order in which it looks paths up."""
        self._app = app
        self._host = host
        self._routes = [route for part in routers for route in part.routes]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._of_a_model(scope):
            await self._app(scope, receive, send)
            return
        try:
            await self._dispatch(scope, receive, send)
        except HeadraceError as error:
            # The model's app answers its own errors: this is one from before.
            await api_error(error, self._host.settings.retry_after).response(scope)(scope, receive, send)

    def _of_a_model(self, scope: Scope) -> bool:
        """Whether the app of a model has the route that takes the request. Names it for metrics."""
        route = next((route for route in self._routes if route.matches(scope)[0] is Match.FULL), None)
        scope["route"] = route
        return isinstance(route, APIRoute) and route.endpoint not in _ABOUT_THE_SERVER

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._host.until_planned()
        body = _Replay(self._host.bodies.json(Request(scope), None), receive)
        model, keep_alive, answer = await self._chosen(Request(scope, receive), body)
        if answer is not None:
            await answer(scope, receive, send)
            return
        table = self._host.table
        with table.using(model) as use, model.serving.metrics.in_flight.track_inprogress():
            if not use.holds:
                await cancel_on_disconnect(self._host, receive, table.until_held(use))
            await model.app(scope, body, send)
        if keep_alive is not None:
            table.keep(model, keep_alive)

    async def _chosen(self, request: Request, body: _Replay) -> tuple[HostedModel, float | None, Response | None]:
        """The model that a request names, the seconds for which it stays loaded after the answer (None: as before), and the
        answer to a request that needs no model.

        Raises: HeadraceError: its body cannot be read, or there is no such model.
        """
        path = request.url.path
        wanted, in_ollama = await body.wanted(request), path.startswith(_OLLAMA)
        name = wanted.model or (wanted.name if in_ollama else None) or request.query_params.get("model")
        model = self._host.chosen(name)
        if not in_ollama:
            return model, None, None
        if path == _SHOW and model.state != "loaded" and model.plan is not None:
            # Clients ask for each model that they list.
            capabilities = planned_capabilities(model.plan)
            return model, None, JSON(description(model.plan, self._host.created, capabilities, gguf=model.gguf))
        keep_alive = duration(wanted.keep_alive)
        if keep_alive == 0 and wanted.empty and path in _MAY_UNLOAD and model.state == "idle":
            return model, None, JSON(nothing_generated(name or model.name, "unload", chat=_MAY_UNLOAD[path]))
        return model, keep_alive, None


class _Replay:
    """The body of a request: once read to choose the model, and then given to its app, as an ASGI ``receive``."""

    def __init__(self, body: Body, receive: Receive) -> None:
        self._body: Body | None = body
        self._receive = receive
        self._is_read = False

    async def wanted(self, request: Request) -> _Wanted:
        """Reads the body, if it may be JSON.

        Raises:
            ApiError: 415 not JSON by its headers; 413 too large; 503 no room for it.
            RequestError: it is not JSON, or what names the model is not text.
        """
        if self._body is None or request.url.path in _NO_JSON or request.method not in ("POST", "PUT", "PATCH"):
            return _Wanted()
        await self._body.read(request)
        self._is_read = True
        if not self._body.data:
            return _Wanted()
        check_content_type(request)
        return decoded(self._body.data, _Wanted)

    async def __call__(self) -> MutableMapping[str, Any]:
        body, self._body = self._body, None
        if body is None or not self._is_read:
            return await self._receive()
        body.release()
        return {"type": "http.request", "body": bytes(body.data), "more_body": False}
