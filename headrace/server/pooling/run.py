"""Runs the requests of one HTTP request for embeddings or scores."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from starlette.responses import Response

from headrace.core.request import Request as EngineRequest
from headrace.errors import EngineDeadError, EngineError, RequestError
from headrace.frontend.pooling import PoolingBatch, PoolingInputs
from headrace.frontend.streams import new_output
from headrace.outputs import OutputDelta, PoolingRequestOutput, RequestOutput, T
from headrace.server.body import Caller, caller, release_body
from headrace.server.errors import JSON, ApiError
from headrace.server.generation import cancel_on_disconnect
from headrace.server.pooling.bodies import PooledBody
from headrace.server.state import Serving

V = TypeVar("V")


async def pooled(
    request: Request,
    state: Serving,
    body: PooledBody,
    request_id: str,
    make: Callable[[PoolingInputs, Mapping[str, Any]], PoolingBatch[T]],
    answer: Callable[[list[PoolingRequestOutput[T]]], dict[str, Any]],
) -> Response:
    """The response to a request, once its texts are computed.

    Args:
        make: makes the engine's requests, with the fields of ``Request`` that it is given; in a thread.
        answer: makes the answer of the results; in a thread.

    Raises:
        RequestError, EngineError: as ``PoolingInputs`` and the engine raise it, and EngineError if every result failed.
    """
    adapter = state.adapter(body.model)
    request.scope["headrace.engine_id"] = request_id
    sender, session = caller(request), request.headers.get("x-session-id") or body.user
    who: dict[str, Any] = {"priority": body.priority, "cache_salt": body.cache_salt, "adapter": adapter}
    who |= {"tenant": sender.tenant, "session": session}
    return await cancel_on_disconnect(
        state, request.receive, _answered(request, state, sender, lambda inputs: make(inputs, who), answer)
    )


async def _answered(
    request: Request,
    state: Serving,
    sender: Caller,
    make: Callable[[PoolingInputs], PoolingBatch[T]],
    answer: Callable[[list[PoolingRequestOutput[T]]], dict[str, Any]],
) -> Response:
    batch = await state.llm.inputs.in_thread(sender.turn, lambda: make(state.llm.pooling))
    release_body(request.scope)
    outputs = await outputs_of(state, batch.requests)

    def shaped() -> Response:
        results = batch.finish(outputs)
        if all(result.error is not None for result in results):
            raise EngineError(str(results[0].error))
        return JSON(answer(results))

    return await state.llm.inputs.in_thread(sender.turn, shaped)


async def outputs_of(state: Serving, requests: Sequence[EngineRequest]) -> list[RequestOutput]:
    """The outputs of requests, in their order."""
    outputs = {request.request_id: new_output(request) for request in requests}
    tenant = requests[0].tenant
    state.enter(tenant, len(requests))
    try:
        async with contextlib.aclosing(await state.llm.add(*requests)) as stream:
            while await stream.more():
                while (delta := stream.ready()) is not None:
                    _check(delta)
                    outputs[delta.request_id].add(delta)
                    if delta.times is not None:
                        prompt = outputs[delta.request_id].prompt_token_ids
                        state.metrics.observe_finished(delta.times, len(prompt), 0)
    finally:
        state.leave(tenant, len(requests))
    return list(outputs.values())


def _check(delta: OutputDelta) -> None:
    """Raises what concerns the whole request: a result that is not finite concerns its own text."""
    message = delta.error or "the request was aborted"
    if delta.engine_died:
        raise EngineDeadError(message)
    if delta.client_error:
        raise RequestError(message, delta.error_param, code=delta.error_code)
    if delta.finish_reason == "abort":
        raise ApiError(503, message, code="aborted")


def usage(results: Sequence[PoolingRequestOutput[Any]]) -> dict[str, Any]:
    """OpenAI's usage object."""
    tokens = sum(len(result.prompt_token_ids) for result in results)
    cached = sum(result.num_cached_tokens for result in results)
    return {"prompt_tokens": tokens, "total_tokens": tokens, "prompt_tokens_details": {"cached_tokens": cached}}


def item(result: PoolingRequestOutput[Any], value: Callable[[Any], V]) -> tuple[V | None, dict[str, Any]]:
    """The value of a result, and what else its entry has: the error of one that failed."""
    if result.outputs is None:
        return None, ApiError(500, str(result.error), code="engine_error").body
    return value(result.outputs), {}


def raw(value: Any) -> msgspec.Raw:
    """Encoded JSON: an answer of many numbers is encoded part by part, between which other threads run."""
    return msgspec.Raw(msgspec.json.encode(value))
