"""Errors in OpenAI's format, ``{"error": {"message", "type", "param", "code"}}``; in Anthropic's under /v1/messages, and in
Ollama's under /api."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from headrace.errors import (
    EngineDeadError,
    EngineError,
    HeadraceError,
    QueueFullError,
    RequestError,
    UnavailableError,
    WeightsError,
)

_MESSAGES = "/v1/messages"
"""The paths under it speak Anthropic's dialect."""
_OLLAMA = "/api/"
"""The paths under it speak Ollama's."""
_MESSAGES_KINDS = {413: "request_too_large", 503: "overloaded_error"}
_OVERLOADED = 529
"""Anthropic's status for 503."""
WEIGHTS_RETRY_SECONDS = 5
"""Seconds after which a request may come again that was refused because of the weights."""
_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(HeadraceError):
    """An HTTP answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind or _KINDS.get(status) or ("invalid_request_error" if status < 500 else "server_error")
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def messages_body(self, request_id: str | None) -> dict[str, Any]:
        """Returns the error in Anthropic's form: the message alone names the field, and its helpers read the code."""
        kind = _KINDS.get(self.status) or _MESSAGES_KINDS.get(self.status)
        kind = kind or ("invalid_request_error" if self.status < 500 else "api_error")
        details = {"details": {"error_code": self.code}} if self.code else {}
        return {"type": "error", "error": {"type": kind, "message": self._named, **details}, "request_id": request_id}

    @property
    def ollama_body(self) -> dict[str, Any]:
        """The error in Ollama's form."""
        return {"error": self._named}

    @property
    def _named(self) -> str:
        """The message, which names the field."""
        return self.message if not self.param or self.param in self.message else f"{self.param}: {self.message}"

    def response(self, scope: Scope | None = None) -> Response:
        """The answer to the request of ``scope``, in the dialect of its path."""
        if scope is not None and scope["path"].startswith(_OLLAMA):
            return JSON(self.ollama_body, self.status, headers=self.headers)
        if scope is None or not f"{scope['path']}/".startswith(f"{_MESSAGES}/"):
            return JSON(self.body, self.status, headers=self.headers)
        status = _OVERLOADED if self.status == 503 else self.status
        return JSON(self.messages_body(scope.get("headrace.request_id")), status, headers=self.headers)


class JSON(Response):
    """A JSON answer, encoded by msgspec."""

    media_type = "application/json"

    def __init__(self, content: Any, status_code: int = 200, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(msgspec.json.encode(content), status_code, headers)


def unavailable(reason: str, retry_after: int) -> ApiError:
    """503: the engine is loading, restarting, gone, or the server is about to stop."""
    return ApiError(503, reason, code="unavailable", headers={"Retry-After": str(retry_after)})


def api_error(error: BaseException, retry_after: int) -> ApiError:
    """The client's view of an error. Hides the details of unexpected errors."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        headers = {"Retry-After": str(retry_after)} if isinstance(error, QueueFullError) else None
        return ApiError(error.status, error.message, param=error.param, code=error.code, kind=error.kind, headers=headers)
    if isinstance(error, UnavailableError):
        return unavailable(first_line(str(error)), max(retry_after, WEIGHTS_RETRY_SECONDS))
    if isinstance(error, WeightsError):
        return ApiError(error.status, first_line(str(error)), code="weights")
    if isinstance(error, EngineDeadError):
        return unavailable(first_line(str(error)) or "the engine is not running", retry_after)
    if isinstance(error, EngineError):
        return ApiError(500, first_line(str(error)) or "the engine failed", code="engine_error")
    if isinstance(error, HTTPException):
        code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
        return ApiError(error.status_code, str(error.detail), code=code, headers=error.headers)
    return ApiError(500, "the server failed on this request; its log says why", code="internal_error")


def shown(text: str, limit: int = 64) -> str:
    """Truncates a client's text for an error message."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def first_line(text: str) -> str:
    """The first line of an engine's error; the rest may be a stack for the log."""
    return text.strip().partition("\n")[0]


def install_handlers(app: FastAPI, retry_after: int) -> None:
    """Answers every foreseen error in the dialect of its path; the middleware answers the others."""

    async def handle(request: Request, error: Exception) -> Response:
        known = api_error(error, retry_after)
        if isinstance(error, HTTPException) and error.status_code == 404:
            known.message = f"there is no {request.method} {shown(request.url.path, 256)}"
        if isinstance(error, HTTPException) and error.status_code == 405:
            known.message = f"{shown(request.url.path, 256)} does not take {request.method}"
        return known.response(request.scope)

    for kind in (HeadraceError, HTTPException):
        app.add_exception_handler(kind, handle)
