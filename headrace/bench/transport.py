"""The HTTP/1.1 connections of a load generator: a read of a stream costs a few microseconds of processor time, a tenth of what
httpx's own transport takes, so that a client process measures the server rather than itself."""

from __future__ import annotations

import asyncio
import ssl
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any, cast

import httptools
import httpx

_Origin = tuple[str, str, int | None]


class StreamTransport(httpx.AsyncBaseTransport):
    """Sends each request over an idle connection, or a new one: their number is that of the requests in flight.

    It goes to the server without a proxy. The read timeout bounds an exchange as a whole.
    """

    def __init__(self) -> None:
        self._idle: defaultdict[_Origin, list[_Connection]] = defaultdict(list)
        self._ssl: ssl.SSLContext | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url, body = request.url, await request.aread()
        idle = self._idle[url.scheme, url.host, url.port]
        limits: dict[str, float | None] = request.extensions.get("timeout", {})
        connection = idle.pop() if idle else await self._connect(url, idle, limits.get("connect"))
        try:
            status, headers = await connection.send(request, body, limits.get("read"))
        except BaseException:
            connection.close()
            raise
        return httpx.Response(status, headers=headers, stream=connection, request=request)

    async def _connect(self, url: httpx.URL, idle: list[_Connection], seconds: float | None) -> _Connection:
        if url.scheme == "https" and self._ssl is None:
            self._ssl = httpx.create_ssl_context()
        secure, port = (self._ssl, 443) if url.scheme == "https" else (None, 80)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(seconds):
                made = await loop.create_connection(lambda: _Connection(idle), url.host, url.port or port, ssl=secure)
        except TimeoutError:
            raise httpx.ConnectTimeout("no connection in time") from None
        return made[1]

    async def aclose(self) -> None:
        for idle in self._idle.values():
            while idle:
                idle.pop().close()


class _Connection(asyncio.Protocol, httpx.AsyncByteStream):
    """One connection, and the body of the answer that comes over it."""

    def __init__(self, idle: list[_Connection]) -> None:
        self._idle = idle
        """Idle connections of the same origin; this one is added when an answer has been read to its end."""
        self._parser: Any = httptools.HttpResponseParser(self)
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._error: Exception | None = None
        self._begin()

    def _begin(self) -> None:
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._status = 0
        self._complete = self._delimited = self._reusable = False

    async def send(self, request: httpx.Request, body: bytes, seconds: float | None) -> tuple[int, list[tuple[bytes, bytes]]]:
        """Returns the answer's status and headers; the body follows by iteration."""
        self._begin()
        if seconds is not None:
            self._timer = self._loop.call_later(seconds, self._fail, httpx.ReadTimeout("no answer in time"))
        lines = [b"%b %b HTTP/1.1\r\n" % (request.method.encode(), request.url.raw_path)]
        lines += [b"%b: %b\r\n" % header for header in request.headers.raw]
        self._transport.write(b"".join([*lines, b"\r\n", body]))
        while self._status < 200:
            await self._wait()
        return self._status, self._headers

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            if self._body:
                data, self._body = b"".join(self._body), []
                yield data
            elif self._complete:
                return
            else:
                await self._wait()

    async def aclose(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._reusable and self._error is None:
            self._idle.append(self)
        else:
            self.close()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._transport.abort()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        self._error = self._error or error
        self._wake()

    # The transport's calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(httpx.RemoteProtocolError(f"this is not an HTTP/1.1 answer: {error}"))
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._idle:
            self._idle.remove(self)
        if self._status and not self._delimited:
            self._complete = True
        self._fail(exc or httpx.RemoteProtocolError("the server closed the connection before the end of its answer"))

    # The parser's calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))
        self._delimited = self._delimited or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._status < 200:  # an interim answer
            self._begin()
        else:
            self._complete, self._reusable = True, self._parser.should_keep_alive()
