"""Sources of replies for ``headrace chat``: an engine started here, or a server's chat completions."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any, Protocol

import httpx
from rich.console import Console

from headrace.bench.serving import events
from headrace.config import EngineArgs
from headrace.engine.spawn import spawn
from headrace.engine.timeline import process_start
from headrace.errors import ConfigError, EngineError, RequestError

Messages = list[dict[str, Any]]

CONNECT_SECONDS = 10.0


class Talker(Protocol):
    """One end of a conversation; all its methods run in one event loop."""

    name: str

    async def start(self) -> None: ...

    def reply(self, messages: Messages) -> AsyncIterator[str]:
        """The pieces of text of one reply. Leaving it early stops the generation."""
        ...

    async def close(self) -> None: ...


class EngineTalker:
    """Runs the model itself."""

    def __init__(self, args: EngineArgs, console: Console, sampling: dict[str, Any]) -> None:
        spawned = spawn(origin=process_start())
        from headrace.cli.announce import AnnouncedLLM

        self._llm = AnnouncedLLM(args, console, report=False, spawned=spawned)
        self._sampling = sampling
        self.name = args.model or ""

    async def start(self) -> None:
        await self._llm.start()
        self.name = self._llm.info.model

    async def reply(self, messages: Messages) -> AsyncIterator[str]:
        params = self._llm.inputs.default_sampling.replace(self._sampling)
        prompt = self._llm.inputs.chat_prompt(messages)
        request = self._llm.inputs.request(prompt, params, request_id=f"chat-{uuid.uuid4().hex}")
        async with await self._llm.add(request) as stream:
            async for delta in stream:
                if delta.error:
                    raise EngineError(delta.error)
                if delta.text:
                    yield delta.text

    async def close(self) -> None:
        await self._llm.close()


class ServerTalker:
    """Asks an OpenAI-compatible server."""

    def __init__(self, url: str, model: str | None, api_key: str | None, sampling: dict[str, Any]) -> None:
        base = url.rstrip("/")
        self._base = base if base.endswith("/v1") else base + "/v1"
        if not self._base.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is not an http:// or https:// address", "--url")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.AsyncClient(headers=headers, timeout=httpx.Timeout(None, connect=CONNECT_SECONDS))
        self._sampling = sampling
        self.name = model or ""

    async def start(self) -> None:
        """Takes the server's first model where none was named, which also shows that the server is there."""
        response = await self._get("/models")
        served = [entry["id"] for entry in response.get("data", [])]
        if not served:
            raise EngineError(f"{self._base} serves no model")
        self.name = self.name or served[0]

    async def reply(self, messages: Messages) -> AsyncIterator[str]:
        body = {"model": self.name, "messages": messages, "stream": True} | self._sampling
        try:
            async with self._client.stream("POST", self._base + "/chat/completions", json=body) as response:
                await _check(response)
                async for data in events(response.aiter_lines()):
                    if "error" in data:
                        raise EngineError(data["error"].get("message", "the server reported an error"))
                    for choice in data.get("choices", []):
                        if choice.get("index", 0) == 0 and (text := choice.get("delta", {}).get("content")):
                            yield text
        except httpx.TransportError as error:
            raise EngineError(f"the connection to {self._base} failed: {error or type(error).__name__}") from None

    async def close(self) -> None:
        await self._client.aclose()

    async def _get(self, path: str) -> dict[str, Any]:
        try:
            response = await self._client.get(self._base + path)
        except httpx.TransportError as error:
            raise EngineError(f"cannot reach {self._base}: {error or type(error).__name__}") from None
        await _check(response)
        return dict(response.json())


async def _check(response: httpx.Response) -> None:
    """Raises an error response as RequestError or EngineError, with the server's message."""
    if response.is_success:
        return
    await response.aread()
    try:
        error = response.json()["error"]
        message, param = error["message"], error.get("param")
    except (ValueError, KeyError, TypeError):
        message, param = response.text[:200] or response.reason_phrase, None
    if response.status_code < 500:
        raise RequestError(f"the server refused ({response.status_code}): {message}", param)
    raise EngineError(f"the server failed ({response.status_code}): {message}")
