"""Runs the engine requests of one HTTP request, and ends them when nobody waits for their outputs any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from starlette.requests import ClientDisconnect

from headrace.core.request import Request
from headrace.errors import EngineDeadError, EngineError, RequestError
from headrace.metrics.prometheus import GenerationObserver
from headrace.outputs import OutputDelta
from headrace.sampling_params import SamplingParams
from headrace.server.errors import ApiError
from headrace.server.state import Serving

if TYPE_CHECKING:
    from headrace.engine.inputs import TokensPrompt

T = TypeVar("T")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class Piece(NamedTuple):
    """A delta, and which prompt of the HTTP request it belongs to."""

    prompt: int
    delta: OutputDelta


async def engine_request(
    serving: Serving,
    prompt_token_ids: list[int],
    params: SamplingParams,
    *,
    request_id: str,
    priority: int,
    cache_salt: str | None,
    names: Mapping[str, str],
) -> Request:
    """The engine's request, checked.

    ``names`` says what the client calls a parameter that the engine knows by another name.

    Raises:
        ApiError: 400, naming the parameter.
    """
    inputs = serving.llm.inputs

    def make() -> Request:
        prompt: TokensPrompt = {"prompt_token_ids": prompt_token_ids}
        return inputs.request(prompt, params, request_id=request_id, priority=priority, cache_salt=cache_salt)

    try:
        # Bad words are compiled against the whole vocabulary: other requests do not wait for that.
        return await asyncio.to_thread(make) if params.bad_words else make()
    except RequestError as error:
        too_long = len(prompt_token_ids) + (params.max_tokens or 1) > serving.model.max_model_len
        code = "context_length_exceeded" if too_long else "invalid_value"
        param = names.get(error.param or "", error.param)
        raise ApiError(error.status, error.message, param=param, code=code, kind=error.kind) from None


class Generation:
    """The engine requests of one HTTP request. Iterate over it once; leaving early aborts what still runs.

    Raises, while it is iterated:
        RequestError, EngineError: from the engine.
        ApiError: a sequence ended in an error, or was aborted from outside.
    """

    def __init__(self, serving: Serving, requests: Sequence[Request]) -> None:
        self.requests = requests
        self.num_choices = sum(request.sampling.n for request in requests)
        self._serving = serving
        self._observer: GenerationObserver = serving.metrics.observe_generation()
        self._pieces: AsyncGenerator[Piece] = self._iterate()
        self._first: Piece | None = None
        self.completion_tokens = 0
        self._cached = [0] * len(requests)

    async def begin(self) -> None:
        """Waits for the first delta, so that an error before it still gets its HTTP status."""
        self._first = await anext(self._pieces, None)
        if self._first is None:
            raise EngineError("the engine ended the request without an answer")

    async def __aiter__(self) -> AsyncIterator[Piece]:
        async with aclosing(self._pieces):
            if self._first is not None:
                yield self._first
            async for piece in self._pieces:
                yield piece

    async def aclose(self) -> None:
        """Aborts what still runs; nothing if all is finished."""
        await self._pieces.aclose()

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object, as of now."""
        prompt_tokens = sum(len(request.prompt_token_ids) for request in self.requests)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }

    async def _iterate(self) -> AsyncGenerator[Piece]:
        source = self._one(0) if len(self.requests) == 1 else self._merged()
        async with aclosing(source):
            async for piece in source:
                self._note(piece)
                yield piece

    async def _one(self, index: int) -> AsyncGenerator[Piece]:
        async with aclosing(await self._serving.llm.add(self.requests[index])) as stream:
            async for delta in stream:
                yield Piece(index, delta)

    async def _merged(self) -> AsyncGenerator[Piece]:
        """All prompts' deltas as they come; the first error ends them all."""
        arrived: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()

        async def pump(index: int) -> None:
            try:
                async with aclosing(self._one(index)) as pieces:
                    async for piece in pieces:
                        arrived.put_nowait(piece)
                arrived.put_nowait(None)
            except Exception as error:
                arrived.put_nowait(error)

        tasks = [asyncio.create_task(pump(index)) for index in range(len(self.requests))]
        try:
            unfinished = len(tasks)
            while unfinished:
                item = await arrived.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    unfinished -= 1
                else:
                    yield item
        finally:
            await cancelled(*tasks)

    def _note(self, piece: Piece) -> None:
        delta = piece.delta
        self.completion_tokens += len(delta.token_ids)
        self._cached[piece.prompt] = max(self._cached[piece.prompt], delta.num_cached_tokens)
        self._observer.delta(piece.prompt, delta)
        if delta.finish_reason == "error":
            message = delta.error or "the engine failed on this request"
            # Not healthy: it is the engine that failed, and it will be back.
            raise EngineError(message) if self._serving.llm.health().ok else EngineDeadError(message)
        if delta.finish_reason == "abort":
            raise ApiError(503, delta.error or "the request was aborted", code="aborted")


async def unless_gone(serving: Serving, receive: Receive, work: Awaitable[T]) -> T:
    """Awaits ``work``, which is cancelled when the client goes or the server stops.

    Raises:
        ClientDisconnect: nobody waits for the answer.
        EngineDeadError: the server stops.
    """
    task = asyncio.ensure_future(work)
    watchers = [asyncio.create_task(_disconnected(receive)), asyncio.create_task(serving.until_stopped())]
    try:
        done, _ = await asyncio.wait([task, *watchers], return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            return task.result()
        await cancelled(task)
        # A watcher ends only by raising.
        raise next(error for watcher in watchers if watcher in done and (error := watcher.exception()))
    finally:
        await cancelled(task, *watchers)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect


async def cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancels and waits until the tasks have cleaned up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
