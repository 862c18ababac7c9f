"""Speaks to an OpenAI-compatible server, whose answers are checked: a server may be another program, or lie."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from headrace.errors import ConfigError, EngineError, RequestError
from headrace.options import shown

CONNECT_SECONDS = 10.0
_MAX_LINE_BYTES = 2**24

T = TypeVar("T")


class _Model(msgspec.Struct):
    """A model, or an upload: what has an id."""

    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class Delta(msgspec.Struct):
    content: str | None = None


class StreamedChoice(msgspec.Struct):
    index: int = 0
    delta: Delta | None = None
    finish_reason: str | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class StreamedEvent(msgspec.Struct):
    """A server-sent event of a streamed chat completion."""

    choices: list[StreamedChoice] = []
    usage: Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(StreamedEvent).decode


def base_url(url: str) -> str:
    """The address without a closing slash or /v1. Raises ConfigError if it is none."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and httpx.URL(url):
            return url.rstrip("/").removesuffix("/v1").rstrip("/")
        why = ""
    except (ValueError, httpx.InvalidURL) as error:
        why = f": {error}"
    raise ConfigError(f"{shown(url)} is not an http:// or https:// address{why}", "--url")


def authorization(api_key: str | None) -> dict[str, str]:
    """The header that carries a key. Raises ConfigError if no header can."""
    if not api_key:
        return {}
    if not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("a key consists of printable ASCII characters", "--api-key")
    return {"Authorization": f"Bearer {api_key}"}


@contextlib.contextmanager
def _connected(what: str) -> Iterator[None]:
    """Raises what goes wrong between here and the server as EngineError."""
    try:
        yield
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError, UnicodeError, OSError) as error:
        raise EngineError(f"{what}: {error or type(error).__name__}") from None


async def first_model(client: httpx.AsyncClient, base: str) -> str:
    """The first model that the server lists.

    Raises:
        EngineError, RequestError: there is none, or no such server.
    """
    with _connected(f"cannot reach {base}"):
        response = await client.get(base + "/v1/models", timeout=CONNECT_SECONDS)
        await _check(response)
    models = _decoded(response.content, _Models, f"{base}/v1/models").data
    if not models:
        raise EngineError(f"{base} serves no model")
    return models[0].id


async def chat_events(client: httpx.AsyncClient, base: str, body: dict[str, Any]) -> AsyncGenerator[list[StreamedEvent]]:
    """The events of a streamed chat completion, to its end: a list for each read that completes some.

    Raises:
        RequestError: the server refuses the request.
        EngineError: it fails, sends something else, or the stream ends before the answer does.
    """
    try:
        content = msgspec.json.encode(body)
    except UnicodeEncodeError:
        raise RequestError("messages must be text that UTF-8 can hold, without lone surrogates", "messages") from None
    headers = {"Content-Type": "application/json"}
    parser = _EventParser()
    with _connected(f"the connection to {base} failed"):
        async with client.stream("POST", base + "/v1/chat/completions", content=content, headers=headers) as response:
            await _check(response)
            async for data in response.aiter_bytes():
                for events in parser.feed(data):
                    yield events
    for events in parser.feed(b"\n"):
        yield events
    if not parser.finished:
        raise EngineError(f"the answer of {base} is cut off: the stream ended before the answer did")


class _EventParser:
    """Cuts server-sent events out of the reads of a stream, wherever it is split. Each data line is an event."""

    def __init__(self) -> None:
        self._rest = b""
        """A line whose end has not arrived."""
        self._done = False
        self.finished = False
        """A choice has finished, or the stream has said that it is done."""

    def feed(self, data: bytes) -> Iterator[list[StreamedEvent]]:
        """Yields the events that end in the data, as one list, if there are any. Raises EngineError after the earlier ones."""
        lines = (self._rest + data).splitlines(keepends=True)
        self._rest = lines.pop() if lines and not lines[-1].endswith((b"\n", b"\r")) else b""
        events: list[StreamedEvent] = []
        try:
            for line in lines:
                # What follows the end is read and ignored, so that the connection can be used again.
                if not self._done and line.startswith(b"data:") and (text := line[5:].strip()):
                    self._add(text, events)
            if len(self._rest) > _MAX_LINE_BYTES:
                raise EngineError(f"the server sends a line of more than {_MAX_LINE_BYTES} bytes")
        finally:
            if events:
                yield events

    def _add(self, text: bytes, events: list[StreamedEvent]) -> None:
        if text == b"[DONE]":
            self._done = self.finished = True
            return
        try:
            event = _decode_event(text)
        except (msgspec.DecodeError, RecursionError) as error:
            raise _not_openai(text, "an event", error) from None
        if event.error is not None:
            raise EngineError(_message(event.error))
        for choice in event.choices:
            if choice.finish_reason:
                self.finished = True
        events.append(event)


async def upload_features(client: httpx.AsyncClient, base: str, file: bytes) -> str:
    """Uploads the features of a picture, safetensors. Returns their id.

    Raises:
        RequestError, EngineError: the server refuses them, or is none that keeps features.
    """
    headers = {"Content-Type": "application/octet-stream"}
    with _connected(f"the connection to {base} failed"):
        response = await client.post(base + "/v1/features", content=file, headers=headers)
        await _check(response)
    return _decoded(response.content, _Model, f"{base}/v1/features").id


async def delete_features(client: httpx.AsyncClient, base: str, identity: str) -> None:
    """Deletes an upload. Raises RequestError or EngineError if the server does not."""
    with _connected(f"the connection to {base} failed"):
        await _check(await client.delete(f"{base}/v1/features/{identity}", timeout=CONNECT_SECONDS))


async def _check(response: httpx.Response) -> None:
    """Raises an error response as RequestError or EngineError, with the server's message."""
    if response.is_success:
        return
    body = await response.aread()
    try:
        error = msgspec.json.decode(body)["error"]
        message, param = _message(error), error.get("param") if isinstance(error, dict) else None
    except (msgspec.DecodeError, KeyError, TypeError):
        message, param = response.text[:200] or response.reason_phrase, None
    if response.status_code < 500:
        raise RequestError(f"the server refused ({response.status_code}): {message}", param if isinstance(param, str) else None)
    raise EngineError(f"the server failed ({response.status_code}): {message}")


def _message(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    return message[:1000] if isinstance(message, str) else "the server reported an error"


def _decoded(data: bytes, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _not_openai(data, what, error) from None


def _not_openai(data: bytes, what: str, error: Exception) -> EngineError:
    return EngineError(f"{what} is not what an OpenAI-compatible server sends: {error}: {shown(data)[1:]}")
