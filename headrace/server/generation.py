"""Runs the engine requests of one HTTP request, and aborts them when the client disconnects."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.requests import ClientDisconnect

from headrace.core.request import Request
from headrace.errors import EngineDeadError, EngineError, RequestError
from headrace.metrics.prometheus import GenerationObserver
from headrace.outputs import AttentionReport, OutputDelta, RequestTimes, most_computed
from headrace.server.errors import ApiError
from headrace.server.shape.explanation import AnswerExplanation
from headrace.server.state import RunningRequest, ServerState, Serving

T = TypeVar("T")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class Piece(NamedTuple):
    """A delta, and the prompt of the HTTP request that it belongs to."""

    prompt: int
    delta: OutputDelta


@contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """Errors of the engine's gate name the client's fields: ``names`` maps the engine's parameters to them."""
    try:
        yield
    except RequestError as error:
        error.param = names.get(error.param or "", error.param)
        raise


class Generation:
    """The engine requests of one HTTP request and the one stream of their deltas.

    Raises, while it is read:
        RequestError, EngineError: from the engine.
        ApiError: a sequence ended in an error, or was aborted from outside.
    """

    def __init__(
        self,
        serving: Serving,
        requests: Sequence[Request],
        *,
        names: Sequence[str] = (),
        keeps_aborted: bool = False,
        weights_number: int | None = None,
    ) -> None:
        """
        Args:
            names: the client's names of the requests, by which it may abort them.
            keeps_aborted: whether an aborted sequence is an answer, with the tokens that it has, and not an error.
            weights_number: of the version with which the client says that they begin; None: that which serves then.
        """
        self.requests = requests
        self._names, self._keeps_aborted = names or [""] * len(requests), keeps_aborted
        self._weights_number = weights_number
        self.num_choices = sum(request.sampling.n for request in requests)
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self._serving = serving
        answers = serving.llm.inputs.answers
        tools = answers.tools if answers is not None else None
        lengths = [len(request.prompt_token_ids) for request in requests]
        self._observer = GenerationObserver(serving.metrics, lengths, tools.name if tools is not None else "none")
        self._prompts = {request.request_id: index for index, request in enumerate(requests)}
        self._cached = [0] * len(requests)
        self._times: RequestTimes | None = None
        self._attention: AttentionReport | None = None
        self._explanations: dict[int, AnswerExplanation] = {}
        """Explanations by prompt, once a sample of it has ended."""
        self._stream: Any = None
        self._first: Piece | None = None
        self._at_end: Callable[[], None] = lambda: None
        self._entered = False
        """Whether its sequences are counted as their tenant's."""

    def of_session(self, session: str) -> None:
        """Names the session that the requests belong to. Before they begin."""
        self.requests = [msgspec.structs.replace(request, session=session) for request in self.requests]

    def at_end(self, work: Callable[[], None]) -> None:
        """``work`` is done when the generation is closed, whether or not it has begun."""
        self._at_end = work

    async def begin(self) -> None:
        """Wait for the first delta, so that an error before it still gets its HTTP status."""
        self._serving.enter(self.requests[0].tenant, self.num_choices)
        self._entered = True
        number = self._serving.llm.weights.status().number if self._weights_number is None else self._weights_number
        for request, name in zip(self.requests, self._names, strict=True):
            self._serving.running[request.request_id] = RunningRequest(request.tenant, name, number)
        self._stream = await self._serving.llm.add(*self.requests)
        if not await self._stream.more():
            raise EngineError("the engine ended the request without an answer")
        self._first = self.ready()

    def more(self) -> Awaitable[bool]:
        """Waits, after ``begin``, until a delta is ready. False: the last one has been read."""
        waiting: Awaitable[bool] = self._stream.more()
        return waiting

    def each(self, take: Callable[[], bool]) -> Awaitable[None]:
        """Calls ``take``, after ``begin``, whenever deltas are ready, until it returns False or the last one is taken."""
        waiting: Awaitable[None] = self._stream.each(take)
        return waiting

    def ready(self) -> Piece | None:
        """The next delta of any of the prompts, in order of arrival, if it has arrived."""
        if self._first is not None:
            piece, self._first = self._first, None
            return piece
        delta = self._stream.ready()
        if delta is None:
            return None
        piece = Piece(self._prompts[delta.request_id], delta)
        self._note(piece)
        return piece

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Runs work on the answer beside the event loop."""
        return await self._serving.llm.inputs.in_thread(self.requests[0].tenant, work)

    async def aclose(self) -> None:
        """Abort what still runs; nothing if all is finished."""
        self._at_end()
        if self._entered:
            self._entered = False
            self._serving.leave(self.requests[0].tenant, self.num_choices)
            for request in self.requests:
                self._serving.running.pop(request.request_id, None)
        if self._stream is not None:
            await self._stream.aclose()

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object, as of now."""
        prompt_tokens = sum(len(request.prompt_token_ids) for request in self.requests)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached), **self._media_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }

    def cached_tokens(self, prompt: int) -> int:
        """Cached tokens of one of the prompts."""
        return self._cached[prompt]

    @property
    def stored_tokens(self) -> int:
        """Prompt tokens that were computed and are in full blocks, which the prefix cache keeps."""
        if not self._serving.llm.args.enable_prefix_caching:
            return 0
        size = self._serving.llm.info.block_size
        full = [len(request.prompt_token_ids) // size * size for request in self.requests]
        return sum(max(0, tokens - cached) for tokens, cached in zip(full, self._cached, strict=True))

    @functools.cached_property
    def _media_tokens(self) -> dict[str, int]:
        """Tokens of pictures and videos in the prompts; empty without media."""
        counts: dict[str, int] = {}
        for media in (media for request in self.requests for media in request.media):
            name = f"{media.modality}_tokens"
            counts[name] = counts.get(name, 0) + media.num_rows
        return {"image_tokens": 0, "video_tokens": 0, **counts} if counts else {}

    @property
    def timing(self) -> dict[str, float | None] | None:
        """vLLM's metrics object, after the last delta. None unless there is one choice, which alone the times describe."""
        times = self._times
        if times is None or self.num_choices != 1:
            return None
        decode = _milliseconds(times.first_token, times.finished)
        total = _milliseconds(times.scheduled, times.finished)
        return {
            "time_to_first_token_ms": _milliseconds(times.scheduled, times.first_token),
            "generation_time_ms": decode,
            "queue_time_ms": _milliseconds(times.arrived, times.scheduled),
            "mean_itl_ms": decode / (self.completion_tokens - 1) if decode is not None and self.completion_tokens > 1 else None,
            "tokens_per_second": 1000 * self.completion_tokens / total if total else None,
        }

    @property
    def attention(self) -> AttentionReport:
        """Report of the prompt's attention, after the last delta, if there is one prompt."""
        return self._attention or AttentionReport(mode="dense")

    def _explain(self, piece: Piece) -> None:
        """Keeps why a sample ended, for as long as it is one of the tenant's last."""
        request, explanation = self.requests[piece.prompt], self._explanations.get(piece.prompt)
        if explanation is None:
            llm = self._serving.llm
            explanation = AnswerExplanation(request, llm.info, caching=llm.args.enable_prefix_caching)
            self._explanations[piece.prompt] = explanation
            self._serving.explanations(request.tenant).put(request.request_id, explanation)
        explanation.end(piece.delta, self._cached[piece.prompt])

    def _note(self, piece: Piece) -> None:
        delta = piece.delta
        self.completion_tokens += len(delta.token_ids)
        for event in delta.events:
            self.reasoning_tokens += event.tokens
        if delta.num_cached_tokens is not None:
            self._cached[piece.prompt] = delta.num_cached_tokens
        self._observer.delta(piece.prompt, delta)
        if delta.finish_reason is None:
            return
        self._times = delta.times or self._times
        self._explain(piece)
        if delta.attention is not None:
            self._attention = most_computed(self._attention, delta.attention)
            reports, name = self._serving.reports(self.requests[0].tenant), delta.request_id
            reports.put(name, most_computed(reports.get(name), delta.attention) or delta.attention)
        if delta.finish_reason == "error":
            message = delta.error or "the engine failed on this request"
            if delta.client_error:
                raise RequestError(message, delta.error_param, code=delta.error_code)
            raise EngineDeadError(message) if delta.engine_died else EngineError(message)
        if delta.finish_reason == "abort" and not self._keeps_aborted:
            raise ApiError(503, delta.error or "the request was aborted", code="aborted")


def _milliseconds(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else 1000 * max(0.0, end - start)


async def cancel_on_disconnect(server: ServerState, receive: Receive, work: Awaitable[T]) -> T:
    """Await ``work``, which is cancelled when the client disconnects or the server stops.

    Raises:
        ClientDisconnect: nobody waits for the answer.
        EngineDeadError: the server stops.
    """
    task = asyncio.ensure_future(work)
    watchers = [asyncio.create_task(_disconnected(receive)), asyncio.create_task(server.until_stopped())]
    done: set[asyncio.Future[Any]] = set()
    try:
        done, _ = await asyncio.wait([task, *watchers], return_when=asyncio.FIRST_COMPLETED)
        if task in done:
            return task.result()
        await cancelled(task)
        # A watcher ends only by raising.
        raise next(error for watcher in watchers if watcher in done and (error := watcher.exception()))
    finally:
        await cancelled(task, *watchers)
        del task, watchers, done  # an error, which one of them has, has this frame in its traceback


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientDisconnect


async def cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks, and wait until they have cleaned up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
