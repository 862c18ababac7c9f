"""Middleware: request ids, log lines, metrics, API keys, hosts and origins, and answers to unexpected errors."""

from __future__ import annotations

import abc
import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.metrics.prometheus import HttpMetrics
from headrace.server.body import ADMIN, TENANT, release_body
from headrace.server.errors import ApiError, api_error, shown
from headrace.server.routes.page import PATHS
from headrace.server.state import ServerState

logger = logging.getLogger("headrace.server")

CLIENT_GONE = 499
"""The status in log and metrics of a request whose client went before the answer."""
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/live", "/ping", "/version", "/metrics"}) | PATHS
_GENERATES = frozenset(
    {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/responses",
        "/generate",
        "/inference/v1/generate",
        "/v1/generate",
        "/api/chat",
        "/api/generate",
    }
)
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_PORT = re.compile(r":[0-9]*$")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


class Observe:
    """Outermost except CORS: request id, log line, metrics; answers errors without a handler."""

    def __init__(self, app: ASGIApp, server: ServerState) -> None:
        self._app = app
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.monotonic(), 0
        given = Headers(scope=scope).get("x-request-id")
        valid = given is None or _REQUEST_ID.fullmatch(given) is not None
        request_id = given if given is not None and valid else uuid.uuid4().hex
        scope["headrace.request_id"] = request_id

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        with self._server.in_flight(), self._server.metrics.in_flight.track_inprogress():
            try:
                if valid:
                    await self._app(scope, receive, send_marked)
                else:
                    wrong = "X-Request-Id takes 1 to 128 letters, digits and ._:/+=@-"
                    await ApiError(400, wrong, param="X-Request-Id").response(scope)(scope, receive, send_marked)
            except ClientDisconnect:
                status, scope["headrace.outcome"] = CLIENT_GONE, "disconnected"
            except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # A panic of a native library is not an Exception.
                logger.exception("request %s failed", request_id)
                if not status:
                    await api_error(error, self._server.settings.retry_after).response(scope)(scope, receive, send_marked)
            finally:
                release_body(scope)
                self._record(scope, status or CLIENT_GONE, time.monotonic() - started, request_id)

    def _record(self, scope: Scope, status: int, seconds: float, request_id: str) -> None:
        path = getattr(scope.get("route"), "path", "unmatched")
        # The app that answered: where there are several models, that of one of them.
        metrics: HttpMetrics = scope["app"].state.serving.metrics
        metrics.observe_http(path, scope["method"], status)
        outcome = scope.get("headrace.outcome") or ("completed" if status < 400 else "refused" if status < 500 else "error")
        if path in _GENERATES:
            metrics.outcomes.labels(path, outcome).inc()
        if self._server.settings.log_requests and path not in OPEN_PATHS:
            engine_id = scope.get("headrace.engine_id", "-")
            # The client's own path may hold anything: %r keeps it on one line.
            logger.info(
                "%s %r %d %s %.1f ms id=%s engine=%s",
                scope["method"], scope["path"], status, outcome, seconds * 1000, request_id, engine_id,
            )  # fmt: skip


class _Gate(abc.ABC):
    """Answers an HTTP request with the error that it finds in it, and passes all others on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self.refusal(scope, Headers(scope=scope)) if scope["type"] == "http" else None
        await (self._app if error is None else error.response(scope))(scope, receive, send)

    @abc.abstractmethod
    def refusal(self, scope: Scope, headers: Headers) -> ApiError | None: ...


class ApiKeys(_Gate):
    """Answers 401 unless the request has one of the keys, which are compared in constant time."""

    def __init__(self, app: ASGIApp, keys: Iterable[str], admin_keys: Iterable[str]) -> None:
        super().__init__(app)
        admin = [hashlib.sha256(key.encode()).digest() for key in admin_keys]
        self._digests = [*(hashlib.sha256(key.encode()).digest() for key in keys), *admin]
        self._admin = frozenset(digest.hex() for digest in admin)

    def refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        known = self._known(headers)
        if known is not None:
            scope[TENANT] = known
            scope[ADMIN] = known in self._admin
        elif scope["path"] not in OPEN_PATHS:
            message = "this server needs an API key that it knows: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            return ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return None

    def _known(self, headers: Headers) -> str | None:
        """The digest of the key, if the request has one that is known."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = [key.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
        found = None
        for key in filter(None, given):
            # ASGI headers are bytes, which Headers reads as latin-1.
            digest = hashlib.sha256(key.encode("latin-1")).digest()
            for known in self._digests:
                if hmac.compare_digest(digest, known):
                    found = known.hex()
        return found


class HeadAsGet:
    """Answers HEAD as GET. uvicorn leaves out the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


class AllowedHosts(_Gate):
    """Answers 403 to requests whose Host header is another name."""

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        super().__init__(app)
        self._names = frozenset(name.lower() for name in names)

    def refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        host = headers.get("host", "").lower()
        if host in self._names or _PORT.sub("", host) in self._names:
            return None
        return ApiError(403, f"the Host header {shown(host)!r} names no host of this server", code="unknown_host")


class SameOrigin(_Gate):
    """Answers 403 to a POST that a browser sends for a page of another origin: without keys, such a page could act as the user.

    Browsers say so in Sec-Fetch-Site; older ones send an Origin that differs from the Host. Other clients send neither.
    """

    def __init__(self, app: ASGIApp, others: Iterable[str]) -> None:
        super().__init__(app)
        self._others = frozenset(others)

    def refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        if scope["method"] in _SAFE_METHODS or self._admits(headers):
            return None
        message = "this server takes no requests from pages of this origin: its operator may allow it (--cors-origin)"
        return ApiError(403, message, param="Origin", code="forbidden_origin")

    def _admits(self, headers: Headers) -> bool:
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if "*" in self._others or origin in self._others:
            return True
        if site is not None:
            return site in ("same-origin", "none")
        return origin is None or origin.partition("://")[2].lower() == headers.get("host", "").lower()
