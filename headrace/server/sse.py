"""Answers: an answer shapes the deltas of a generation, whole or as server-sent events."""

from __future__ import annotations

import abc
import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.errors import RequestError
from headrace.server.body import release_body
from headrace.server.errors import JSON, ApiError, api_error
from headrace.server.generation import Generation, Piece, cancel_on_disconnect, cancelled
from headrace.server.protocol import WRITE
from headrace.server.schema import GenerationBody
from headrace.server.state import ServedModel, Serving

logger = logging.getLogger("headrace.server")
_encode = msgspec.json.Encoder().encode
PING_SECONDS = 15.0
SEND = "headrace.send"
"""Key of the scope: the ``send`` of the HTTP server. The middleware's, one around the other, change the start of a response
alone, and cost as much as the rest of an event's way."""


_MARK = secrets.token_hex(16)
"""A text that no client knows, and so none sends."""
_Write = Callable[[bytes], bool]


class Answer(abc.ABC):
    """Shapes the deltas of one generation for a protocol."""

    media_type = "text/event-stream"
    done = b""
    """Sent after the last event."""
    ping = b""
    """Sent every 15 seconds between the events."""

    async def prepare(self, piece: Piece) -> None:  # noqa: B027
        """Shapes what a large delta has of a whole sequence beside the event loop, before ``add``."""

    @abc.abstractmethod
    def add(self, piece: Piece) -> Iterable[dict[str, Any]]:
        """The events of one delta; none without ``stream``."""

    @abc.abstractmethod
    def last(self) -> Iterable[dict[str, Any]]:
        """The events after the last delta."""

    @abc.abstractmethod
    def whole(self) -> Any:
        """The answer of a request without ``stream``, after every delta was added."""

    def encode(self, event: dict[str, Any]) -> bytes:
        """An event as it is sent."""
        return named_event(event)

    def sent(self, piece: Piece) -> bytes:
        """The events of one delta as they are sent."""
        return b"".join([self.encode(event) for event in self.add(piece)])

    @abc.abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """Returns the event that ends the stream in place of ``last`` and ``done``."""


def named_event(event: dict[str, Any]) -> bytes:
    """An event with its type in a line of its own, as Anthropic's streams and OpenAI's responses have them."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), _encode(event))


class DataAnswer(Answer):
    """Sends events as data alone, and ``[DONE]`` after the last."""

    done = b"data: [DONE]\n\n"

    def encode(self, event: dict[str, Any]) -> bytes:
        return b"data: %b\n\n" % _encode(event)

    def failed(self, error: ApiError) -> bytes:
        return b"data: %b\n\n" % _encode(error.body)


class ChunkAnswer(DataAnswer):
    """Shapes deltas as chunks: of OpenAI's chat and text completions."""

    def __init__(self, body: GenerationBody, model: ServedModel, generation: Generation, request_id: str, kind: str) -> None:
        """``kind``: the ``object`` of events and answers."""
        if body.return_metrics and generation.num_choices != 1:
            message = f"return_metrics needs one choice, and this request makes {generation.num_choices}"
            raise RequestError(message, "return_metrics")
        if body.return_attention_report and len(generation.requests) != 1:
            message = f"return_attention_report needs one prompt, and this request has {len(generation.requests)}"
            raise RequestError(message, "return_attention_report")
        options = body.stream_options
        self._include_attention = body.return_attention_report
        self._model = model
        self._generation = generation
        self._include_usage = options is not None and options.include_usage
        self._include_metrics = body.return_metrics or model.per_request_metrics
        self._continuous_usage = options is not None and options.continuous_usage_stats
        with_logprobs = generation.requests[0].sampling.logprobs is not None
        self.varies_in_text = body.stream and not (with_logprobs or body.return_token_ids or self._continuous_usage)
        """The events of a choice between the first and the last differ in their text alone."""
        self._frames: dict[Hashable, list[bytes]] = {}
        """Events around their text."""
        self._head = {
            "id": request_id,
            "object": kind,
            "created": int(time.time()),
            "model": model.called(body.model),
            "system_fingerprint": model.fingerprint,
        }
        self._opening = b"data: %b," % _encode(self._head)[:-1]
        """Beginning of every event, up to the fields that differ."""

    def encode(self, event: dict[str, Any]) -> bytes:
        return b"%b%b\n\n" % (self._opening, _encode(event)[1:])

    def text_event(self, key: Hashable, text: str, choice: Callable[[str], dict[str, Any]]) -> bytes:
        """The event of a text, as it is sent. The first one of a key is encoded whole, with ``choice(text)``; with the others,
        the text alone is."""
        frame = self._frames.get(key)
        if frame is None:
            frame = self._frames[key] = self.encode(self.chunk(choice(_MARK))).split(_encode(_MARK))
        return _encode(text).join(frame)

    def usage(self) -> dict[str, Any]:
        return self._generation.usage

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Returns the fields of one event beside the head."""
        chunk: dict[str, Any] = {"choices": [choice]}
        if self._continuous_usage:
            chunk["usage"] = self.usage()
        elif self._include_usage:
            chunk["usage"] = None
        if not self._include_usage and choice.get("finish_reason") is not None:
            chunk |= self.metrics()
        return chunk

    def last(self) -> Iterable[dict[str, Any]]:
        """The events after the last delta: the usage, if it was requested."""
        return [{"choices": [], "usage": self.usage(), **self.metrics()}] if self._include_usage else []

    def metrics(self) -> dict[str, Any]:
        """The request's times and how it attended, for the answer or its last event, if they are wanted."""
        wanted: dict[str, Any] = {"metrics": self._generation.timing} if self._include_metrics else {}
        if self._include_attention:
            wanted["attention"] = msgspec.to_builtins(self._generation.attention)
        return wanted


async def respond(request: Request, serving: Serving, generation: Generation, answer: Answer, *, stream: bool) -> Response:
    """The response to a request whose generation has not begun."""
    release_body(request.scope)
    if stream:
        try:
            await cancel_on_disconnect(serving, request.receive, generation.begin())
        except BaseException:
            await generation.aclose()
            raise
        return EventStream(serving, generation, answer)
    return JSON(await cancel_on_disconnect(serving, request.receive, collected(generation, answer)))


async def collected(generation: Generation, answer: Answer) -> Any:
    """The whole answer of a generation."""
    async with contextlib.aclosing(generation):
        await generation.begin()
        more = True
        while more:
            while (piece := generation.ready()) is not None:
                if piece.delta.is_large:
                    await answer.prepare(piece)
                for _ in answer.add(piece):
                    pass
            more = await generation.more()
        return answer.whole()


_MOST_AT_ONCE = 2**16
"""Bytes of events after which no more are joined."""


class EventStream(Response):
    """Sends the events of an answer as they come.

    The generation is aborted when the client disconnects. An error after the start becomes the last event.
    """

    def __init__(self, serving: Serving, generation: Generation, answer: Answer) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=answer.media_type)
        del self.headers["content-length"]
        self._serving = serving
        self._generation = generation
        self._answer = answer
        sampled = [request.sampling for request in generation.requests]
        self._prepares = any(each.prompt_logprobs is not None or each.return_routed_experts for each in sampled)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await cancel_on_disconnect(self._serving, receive, self._send_all(scope[SEND], scope.get(WRITE)))
            last = self._answer.done
        except ClientDisconnect:
            scope["headrace.outcome"] = "disconnected"
            return
        except Exception as error:
            scope["headrace.outcome"] = "error"
            known = api_error(error, self._serving.settings.retry_after)
            if known.code == "internal_error":
                logger.exception("a stream failed")
            last = self._answer.failed(known)
        finally:
            await self._generation.aclose()
        await scope[SEND]({"type": "http.response.body", "body": last, "more_body": False})

    async def _send_all(self, send: Send, write: _Write | None = None) -> None:
        more, pings = self._generation.more, None
        try:
            await self._send_ready(send)
            if self._answer.ping:
                pings = asyncio.create_task(self._send_pings(send))
            while await more():
                await self._send_ready(send)
                if write is not None and not self._prepares:
                    await self._generation.each(partial(self._write_ready, write))
        finally:
            if pings is not None:
                await cancelled(pings)
        for event in self._answer.last():
            await send({"type": "http.response.body", "body": self._answer.encode(event), "more_body": True})

    async def _send_ready(self, send: Send) -> None:
        """Sends what has arrived, at once: a server that is behind makes up for it so."""
        answer, body, failure = self._answer, bytearray(), None
        try:
            while len(body) < _MOST_AT_ONCE and (piece := self._generation.ready()) is not None:
                if piece.delta.is_large:
                    await answer.prepare(piece)
                body += answer.sent(piece)
        except Exception as error:
            failure = error
        if body:
            await send({"type": "http.response.body", "body": bytes(body), "more_body": True})
        if failure is not None:
            raise failure

    def _write_ready(self, write: _Write) -> bool:
        """Sends like ``_send_ready``, without waiting. False: the next event must wait."""
        body, more = b"", True
        try:
            while len(body) < _MOST_AT_ONCE and (piece := self._generation.ready()) is not None:
                body += self._answer.sent(piece)
        finally:
            if body:
                more = write(body)
        return more

    async def _send_pings(self, send: Send) -> None:
        while True:
            await asyncio.sleep(PING_SECONDS)
            await send({"type": "http.response.body", "body": self._answer.ping, "more_body": True})
