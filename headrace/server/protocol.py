"""uvicorn's HTTP/1.1 connection, with limits on what a client may send and on the time it may take."""

from __future__ import annotations

import asyncio
from asyncio.events import TimerHandle
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import httptools
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from headrace.server.errors import ApiError, unavailable
from headrace.server.settings import ServerSettings

_LINGER_SECONDS = 2.0
"""Time for which the rest of a refused message is read and discarded: closing at once would reset the connection, and the
client might lose the answer."""
_PROBE_SECONDS = 0.1
"""Time from a client's end of file to the first probe; it doubles from probe to probe. A client that left is noticed by the
second, one that waits for a quick answer gets none."""
WRITE = "headrace.write"
"""Key of the scope: writes a part of the answer at once, at a fraction of the cost of ``send``, which is a coroutine."""


class LimitedProtocol(HttpToolsProtocol):
    """Answers a client that exceeds a limit, or closes its connection.

    While a request is answered, what the client sends behind it is held unparsed, so that reading never pauses and the
    client's departure is noticed.
    """

    def __init__(self, settings: ServerSettings, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.timeout_keep_alive = settings.keep_alive_timeout  # type: ignore[assignment]  # seconds for call_later
        self._settings = settings
        self._state: Literal["idle", "head", "body"] = "idle"
        """The part of a message that the parser is in."""
        self._head_bytes = 0
        """Size of the request line and of the headers parsed so far, trailers included."""
        self._unparsed_bytes = 0
        """Bytes given to the parser since it last reported anything."""
        self._refusal: ApiError | None = None
        self._started: RequestResponseCycle | None = None
        """The request that the app got last. ``cycle`` is the one parsed last, which may wait behind it."""
        self._held = b""
        self._discarding = False
        self._half_closed = False
        self._awaited: Literal["head", "body"] | None = None
        self._timer: TimerHandle | None = None
        self._send_timer: TimerHandle | None = None

    @property
    def _answering(self) -> bool:
        """Whether a request has arrived in full and the app works on its answer."""
        return self._started is not None and not self._started.response_complete and not self._started.more_body

    # The transport's calls.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._settings.max_connections:
            self._discarding = True
            message = "the server has as many connections as it takes (max_connections)"
            self._answer(unavailable(message, self._settings.retry_after))
            transport.close()
        else:
            self._await_client()

    def data_received(self, data: bytes) -> None:
        if self._discarding:
            return
        if self._answering:
            self._hold(data)
            return
        self._unset_keepalive_if_required()
        self._feed(data)
        self._await_client()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection open for the answer to a client that has closed its sending side only."""
        if not self._answering or not self.transport.can_write_eof():  # TLS has no half-closed connections
            return False
        self._half_closed = True
        self._set_timer(_PROBE_SECONDS, self._probe, _PROBE_SECONDS)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        if self._started is not None and not self._started.response_complete:
            self._started.disconnected = True
            self._started.message_event.set()
        self.pipeline.clear()
        self._held = b""
        self._set_timer(None)
        self._limit_sending(False)
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._limit_sending(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._limit_sending(False)

    # The parser's calls. An exception ends feed_data.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._state = "head"
        self._head_bytes = self._unparsed_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        limit = self._settings.max_url_bytes
        if len(self.url) > limit:
            self._refusal = ApiError(414, f"the URL is larger than {limit} bytes (max_url_bytes)", code="url_too_large")
            raise self._refusal
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + len(b": \r\n"))
        if self._state == "head":  # else a trailer, which must not pass for a header that was checked
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._state = "body"
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._state = "idle"
            super().on_message_complete()

    def _count(self, size: int) -> None:
        self._head_bytes += size
        self._unparsed_bytes = 0
        self._check_head(self._head_bytes)

    def _check_head(self, size: int) -> None:
        limit = self._settings.max_header_bytes
        if size > limit:
            message = f"the request's headers are larger than {limit} bytes (max_header_bytes)"
            self._refusal = ApiError(431, message, code="headers_too_large")
            raise self._refusal

    # Requests.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._started = cycle
        cycle.scope[WRITE] = partial(self._write, cycle)  # type: ignore[literal-required]
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]

    def _write(self, cycle: RequestResponseCycle, body: bytes) -> bool:
        """Writes a part of a chunked answer that has begun. False: the client is slow to read, and ``send`` waits for it."""
        if not cycle.disconnected:
            self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return not self.flow.write_paused

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._limit_sending(True)
            return
        held, self._held = self._held, b""
        if held:
            self.data_received(held)
        if self._half_closed and not self._answering:
            self.transport.close()
        self._await_client()

    def _feed(self, data: bytes) -> None:
        self._unparsed_bytes += len(data)
        try:
            self.parser.feed_data(data)
            self._check_head(self._unparsed_bytes)
        except httptools.HttpParserUpgrade as upgrade:
            self._decline_upgrade(data[upgrade.args[0] :])
        except (httptools.HttpParserError, ApiError):
            self._refuse(self._refusal or ApiError(400, "this is not an HTTP/1.1 request", code="invalid_http"))

    def _decline_upgrade(self, rest: bytes) -> None:
        """Parse the request again without its offer: the parser skips the body of a message that offers an upgrade."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(ApiError(405, "this server is not a proxy", code="method_not_allowed"))
            return
        lines = [b"%s %s HTTP/%s" % (method, self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self._feed(b"\r\n".join([*lines, b"", rest]))

    def _hold(self, data: bytes) -> None:
        """Keep what a client sends ahead of the answer. Too much of it is dropped: after the answer the connection is
        closed, and the client repeats what was not answered."""
        self._held += data
        if len(self._held) > self._settings.max_header_bytes:
            self._drop_rest()

    def _drop_rest(self) -> None:
        self._discarding = True
        self._held = b""
        self.pipeline.clear()
        if self._started is not None:
            self._started.keep_alive = False

    # Refusals and time limits.

    def _refuse(self, error: ApiError) -> None:
        """Answer in place of the app and take no more requests; after the answer that is under way, if there is one."""
        answering = self._answering
        self._drop_rest()
        if answering:
            return
        if self._started is not None and not self._started.response_complete:
            self._started.disconnected = True
            self._started.message_event.set()
        self._answer(error)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._set_timer(_LINGER_SECONDS, self.transport.abort)

    def _answer(self, error: ApiError) -> None:
        response = error.response()
        headers = [*self.server_state.default_headers, *response.raw_headers, (b"connection", b"close")]
        lines = [STATUS_LINE[error.status], *(b"%s: %s\r\n" % header for header in headers), b"\r\n", bytes(response.body)]
        self.transport.write(b"".join(lines))

    def _await_client(self) -> None:
        """Set the time limit for what the client has to send next. It runs from the first byte to the last."""
        if self._discarding:
            return
        awaited: Literal["head", "body"] | None = "body" if self._state == "body" else "head"
        if self._answering or (self._state == "idle" and self.timeout_keep_alive_task is not None):
            awaited = None
        if awaited != self._awaited:
            self._awaited = awaited
            seconds = {"head": self._settings.header_timeout, "body": self._settings.body_timeout}
            self._set_timer(seconds.get(awaited), self._client_timed_out) if awaited else self._set_timer(None)

    def _client_timed_out(self) -> None:
        if self._state == "idle" or (self._state == "body" and self.cycle.response_started):
            self.transport.close()
        else:
            part, option = ("headers", "header_timeout") if self._state == "head" else ("body", "body_timeout")
            self._refuse(ApiError(408, f"the request's {part} did not arrive in time ({option})", code="request_timeout"))

    def _probe(self, elapsed: float) -> None:
        """Send a half-closed client an interim response. If the client has left altogether, its machine resets the
        connection, which the next write finds out."""
        if self._answering and self._started is not None and not self._started.response_started:
            if self._started.scope["http_version"] == "1.1":
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._set_timer(elapsed, self._probe, 2 * elapsed)

    def timeout_keep_alive_handler(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()  # the last answer was never read; close() would wait for that
        else:
            super().timeout_keep_alive_handler()

    def _limit_sending(self, waiting: bool) -> None:
        """Limit the time for which a client that does not read its answer holds up the connection."""
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
        if waiting:
            unsent = self.transport.get_write_buffer_size()
            self._send_timer = self.loop.call_later(self._settings.send_timeout, self._check_sent, unsent)

    def _check_sent(self, before: int) -> None:
        if self.transport.get_write_buffer_size() < before:
            self._limit_sending(True)
        else:
            self.transport.abort()

    def _set_timer(self, seconds: float | None, call: Callable[..., None] | None = None, *arguments: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None or call is None else self.loop.call_later(seconds, call, *arguments)
