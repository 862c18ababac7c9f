"""Sources of replies for ``headrace chat``: an engine started here, or a server's chat completions."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator
from typing import Any, Protocol

import httpx
from rich.console import Console

from headrace.bench.client import CONNECT_SECONDS, Usage, authorization, base_url, chat_events, first_model
from headrace.cli.options import MAX_TOKENS, spawn_checked
from headrace.config import EngineArgs
from headrace.errors import ConfigError, EngineError

Messages = list[dict[str, Any]]


class Talker(Protocol):
    """One end of a conversation; all its methods run in one event loop."""

    name: str
    sampling: dict[str, Any]
    """Sampling parameters of the next reply, where they are not the model's."""
    usage: Usage | None
    """Tokens of the last reply and of what it replies to; None: not known."""

    def choose(self, name: str) -> None:
        """Talks to another model. Raises ConfigError where there is no other."""
        ...

    async def start(self) -> None: ...

    def reply(self, messages: Messages) -> AsyncIterator[str]:
        """The pieces of text of one reply. Leaving it early stops the generation."""
        ...

    async def close(self) -> None: ...


class EngineTalker:
    """Runs the model itself."""

    def __init__(self, args: EngineArgs, console: Console, sampling: dict[str, Any], chat_template: str | None = None) -> None:
        spawned = spawn_checked(args, sampling)
        from headrace.cli.startup import AnnouncedLLM

        self._llm = AnnouncedLLM(args, console, chat_template=chat_template, spawned=spawned)
        self.sampling = sampling
        self.usage: Usage | None = None
        self.name = args.model or ""

    def choose(self, name: str) -> None:
        raise ConfigError("one model is loaded here; leave, and start with another")

    async def start(self) -> None:
        await self._llm.start()
        self.name = self._llm.info.model

    async def reply(self, messages: Messages) -> AsyncIterator[str]:
        params = self._llm.inputs.default_sampling.replace(self.sampling)
        async with self._llm.inputs.loaded_chat_prompt(messages) as prompt:
            request = await self._llm.inputs.request_async(
                prompt, params, request_id=f"chat-{uuid.uuid4().hex}", default_max_tokens=MAX_TOKENS
            )
        self.usage = usage = Usage(prompt_tokens=len(request.prompt_token_ids))
        async with await self._llm.add(request) as stream:
            async for delta in stream:
                if delta.error:
                    raise EngineError(delta.error)
                usage.completion_tokens += len(delta.token_ids)
                if delta.text:
                    yield delta.text

    async def close(self) -> None:
        await self._llm.close()


class ServerTalker:
    """Asks an OpenAI-compatible server."""

    def __init__(self, url: str, model: str | None, api_key: str | None, sampling: dict[str, Any]) -> None:
        self._base = base_url(url)
        self._client = httpx.AsyncClient(headers=authorization(api_key), timeout=httpx.Timeout(None, connect=CONNECT_SECONDS))
        self.sampling = sampling
        self.usage: Usage | None = None
        self.name = model or ""

    def choose(self, name: str) -> None:
        if not name:
            raise ConfigError("/model needs the name of a model")
        self.name = name

    async def start(self) -> None:
        """Takes the server's first model where none was named, which also shows that the server is there."""
        first = await first_model(self._client, self._base)
        self.name = self.name or first

    async def reply(self, messages: Messages) -> AsyncIterator[str]:
        body = {"model": self.name, "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
        body |= self.sampling
        self.usage = None
        async with contextlib.aclosing(chat_events(self._client, self._base, body)) as reads:
            async for events in reads:
                self.usage = next((event.usage for event in events if event.usage is not None), self.usage)
                for choice in (choice for event in events for choice in event.choices):
                    if choice.index == 0 and choice.delta is not None and choice.delta.content:
                        yield choice.delta.content

    async def close(self) -> None:
        await self._client.aclose()
