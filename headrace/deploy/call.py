"""HttpCall: one HTTP request on its way from the ingress to a replica, and how an ASGI application answers it there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message


class HttpCall(NamedTuple):
    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    """Names in lower case."""
    body: bytes
    client: tuple[str, int] | None

    def header(self, name: str) -> str | None:
        return next((value.decode("latin-1") for key, value in self.headers if key == name.encode()), None)


class HttpStart(NamedTuple):
    """The beginning of an answer, with the first part of its body: before it, nothing has been promised to the client."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


async def answered(app: ASGIApp, call: HttpCall) -> AsyncGenerator[HttpStart | bytes, None]:
    """The answer of an application: ``HttpStart``, then further parts of the body. What is there at once is one part.

    Leaving early is to the application as if the client had gone.
    """
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": call.query,
        "root_path": "",
        "headers": call.headers,
        "client": call.client,
        "server": None,
    }
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    gone = asyncio.Event()
    unread: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]

    async def receive() -> Message:
        if unread:
            return unread.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        try:
            await app(scope, receive, sent.put)
        finally:
            sent.put_nowait(None)

    task = asyncio.create_task(run())
    start, body = None, b""
    try:
        while (message := await sent.get()) is not None:
            start = message if message["type"] == "http.response.start" else start
            body += message.get("body", b"")
            if body and sent.empty():
                yield _part(start, body)
                start, body = None, b""
        if start is not None or body:
            yield _part(start, body)
        await task
    finally:
        gone.set()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


def _part(start: Message | None, body: bytes) -> HttpStart | bytes:
    return body if start is None else HttpStart(start["status"], list(start["headers"]), body)
