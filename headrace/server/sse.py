"""Server-sent events: a response whose chunks are JSON, and which ends with an error event if something breaks."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.server.errors import api_error
from headrace.server.generation import Generation, unless_gone
from headrace.server.state import Serving

logger = logging.getLogger("headrace.server")
_encode = msgspec.json.Encoder().encode


class EventStream(Response):
    """Sends each event as ``data: {json}``, then ``data: [DONE]``.

    The generation ends when the client goes. An error after the start becomes an event ``{"error": ...}``, which
    is the last one.
    """

    media_type = "text/event-stream"

    def __init__(self, serving: Serving, generation: Generation, events: AsyncIterator[dict[str, Any]]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._serving = serving
        self._generation = generation
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await unless_gone(self._serving, receive, self._send_all(send))
            last = b"data: [DONE]\n\n"
        except ClientDisconnect:
            scope["headrace.outcome"] = "disconnected"
            return
        except Exception as error:
            scope["headrace.outcome"] = "error"
            known = api_error(error, self._serving.settings.retry_after)
            if known.code == "internal_error":
                logger.exception("a stream failed")
            last = _data(known.body)
        finally:
            await self._generation.aclose()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_all(self, send: Send) -> None:
        async for event in self._events:
            await send({"type": "http.response.body", "body": _data(event), "more_body": True})


def _data(event: dict[str, Any]) -> bytes:
    return b"data: " + _encode(event) + b"\n\n"
