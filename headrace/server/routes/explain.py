"""GET /v1/explain, /v1/explain/{request_id}, POST /v1/chat/completions/attention: why an answer is as it is; GET /v1/inspect,
/v1/inspect/{request_id}: how the prompts of recent requests attended."""

from __future__ import annotations

import base64
import contextlib
import itertools
import operator
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.core.request import Request as EngineRequest
from headrace.errors import EngineError, RequestError
from headrace.outputs import AttentionReport
from headrace.pooling_params import PoolingParams
from headrace.sampling_params import SamplingParams
from headrace.server.body import Caller, caller, release_body
from headrace.server.errors import JSON, ApiError, shown
from headrace.server.generation import cancel_on_disconnect
from headrace.server.pooling.run import outputs_of
from headrace.server.request import posts
from headrace.server.routes.chat import chat_generation
from headrace.server.schema import ChatBody
from headrace.server.state import Serving, ready

router = APIRouter()
MAX_ATTENTION_TOKENS = 1024
"""Tokens of a conversation whose attention is shown: the weights are their number squared."""
_MOST = 100


@router.get("/v1/explain")
async def recent(request: Request) -> Response:
    """Explanations of the API key's last answers, the latest first; the query's ``last`` says how many, 20 by default."""
    state, last = ready(request), _number(request, "last", 20)
    kept = [explanation for _, explanation in state.explanations(caller(request).tenant).items()]
    kept.sort(key=lambda explanation: -explanation.created)
    return JSON({"object": "list", "data": [explanation.json() for explanation in kept[: min(last, _MOST)]]})


@router.get("/v1/explain/{request_id}")
async def one(request: Request) -> Response:
    """Times, use of the cache and end of one of the API key's last answers. The id is that of the answer."""
    state, request_id = ready(request), request.path_params["request_id"]
    found = state.explanations(caller(request).tenant).get(request_id)
    if found is None:
        message = f"no recent answer has the id {shown(request_id, 128)!r}"
        raise ApiError(404, message, param="request_id", code="not_found")
    return JSON(found.json())


@router.get("/v1/inspect")
async def dump(request: Request) -> Response:
    """A line of JSON for each of the API key's last requests whose prompts attended sparsely: what the router decided."""
    state = ready(request)
    lines = [_encoded(name, report) + b"\n" for name, report in state.reports(caller(request).tenant).items()]
    return Response(b"".join(lines), media_type="application/jsonl")


@router.get("/v1/inspect/{request_id}")
async def inspect(request: Request) -> Response:
    """Density and head types of one of the last requests whose prompts attended sparsely. The id is that of its answer."""
    state, request_id = ready(request), request.path_params["request_id"]
    report = state.reports(caller(request).tenant).get(request_id)
    if report is None:
        message = f"no recent request {shown(request_id, 128)!r} has a prompt that attended sparsely"
        raise ApiError(404, message, param="request_id", code="not_found")
    return Response(_encoded(request_id, report), media_type="application/json")


@posts(router, "/v1/chat/completions/attention", kind=ChatBody, endpoint="chat")
async def attention(request: Request, state: Serving, body: ChatBody) -> Response:
    """Attention weights between the tokens of a conversation, in the query's ``layer`` and ``head``; with ``by=message``,
    between its messages.

    Without ``head``, the mean over the layer's heads. One such request is computed at a time.
    """
    pooling, by = _pooling(request, state), request.query_params.get("by", "token")
    if by not in ("token", "message"):
        raise RequestError(f"by must be token or message, not {shown(by, 32)!r}", "by")
    name, who = f"attn-{uuid.uuid4().hex}", caller(request)
    return await cancel_on_disconnect(
        state, request.receive, _answered(request, state, body, pooling, name, who, by == "message")
    )


def _encoded(request_id: str, report: AttentionReport) -> bytes:
    return msgspec.json.encode({"id": request_id, "object": "attention_report", **msgspec.to_builtins(report)})


async def _answered(
    request: Request, state: Serving, body: ChatBody, pooling: PoolingParams, name: str, who: Caller, by_message: bool
) -> Response:
    generation = await chat_generation(state, body, name, who)
    try:
        watched = _watched(generation.requests[0], pooling)
        segments = await _segments(state, body, watched.prompt_token_ids, name, who) if by_message else []
        release_body(request.scope)
        async with state.watching:
            (output,) = await outputs_of(state, [watched])
    finally:
        await generation.aclose()
    if output.pooled is None:
        raise EngineError(output.error or "the engine gave no weights")
    heads = state.llm.info.layers[pooling.layer].num_heads
    facts = {
        "id": name,
        "object": "attention",
        "model": state.model.called(body.model),
        "layer": pooling.layer,
        "head": pooling.query_head,
        "num_layers": len(state.llm.info.layers),
        "num_heads": heads,
    }
    if by_message:
        size = len(watched.prompt_token_ids)
        weights = np.frombuffer(output.pooled, dtype="<f4").reshape(size, size)
        starts = [segment["start"] for segment in segments]
        sums = np.add.reduceat(np.add.reduceat(weights, starts, axis=1), starts, axis=0)
        means = sums / np.diff([*starts, size])[:, None]
        return JSON(facts | {"segments": segments, "weights": means.tolist()})
    tokens = [state.model.texts.text(token) for token in watched.prompt_token_ids]
    return JSON(facts | {"tokens": tokens, "weights": base64.b64encode(output.pooled).decode()})


async def _segments(state: Serving, body: ChatBody, tokens: Sequence[int], name: str, who: Caller) -> list[dict[str, Any]]:
    """The tokens of each message: up to where the conversation that ends with it has the same. A message that the chat template
    cannot end with is part of the next one's segment, what opens an answer part of the last."""
    ends = []
    for count in range(1, len(body.messages)):
        earlier = msgspec.structs.replace(
            body, messages=body.messages[:count], add_generation_prompt=False, continue_final_message=False
        )
        with contextlib.suppress(RequestError):
            generation = await chat_generation(state, earlier, name, who)
            async with contextlib.aclosing(generation):
                same = map(operator.eq, tokens, generation.requests[0].prompt_token_ids)
                ends.append((count - 1, sum(itertools.takewhile(bool, same))))
    segments: list[dict[str, Any]] = []
    start = 0
    for message, end in [*ends, (len(body.messages) - 1, len(tokens))]:
        if end > start:
            segments.append({"message": message, "role": body.messages[message]["role"], "start": start, "end": end})
            start = end
    return segments


def _watched(request: EngineRequest, pooling: PoolingParams) -> EngineRequest:
    """The request of a conversation's weights in place of its continuation. Raises: RequestError: it is too long."""
    length = len(request.prompt_token_ids)
    if length > MAX_ATTENTION_TOKENS:
        message = f"the conversation has {length} tokens, and attention is shown of at most {MAX_ATTENTION_TOKENS}"
        raise RequestError(message, "messages", code="context_length_exceeded")
    return msgspec.structs.replace(
        request,
        pooling=pooling,
        sampling=SamplingParams(sparse_prefill=False),
        constraint=None,
        bad_words=None,
        parse=None,
    )


def _pooling(request: Request, state: Serving) -> PoolingParams:
    """The layer and head of a request. Raises: RequestError: they do not exist, or their weights cannot be shown."""
    layers, layer = state.llm.info.layers, _number(request, "layer", 0)
    if state.llm.args.tensor_parallel_size > 1:
        raise RequestError("attention is not shown under tensor parallelism: each rank has some of the heads", "layer")
    if layer >= len(layers):
        raise RequestError(f"there is no attention layer {layer}: the model has {len(layers)}", "layer")
    if layers[layer].mla:
        raise RequestError(f"layer {layer} keeps compressed KV, whose attention weights are not shown", "layer")
    head = None
    if "head" in request.query_params:
        head = _number(request, "head", 0)
        if head >= layers[layer].num_heads:
            raise RequestError(f"layer {layer} has no head {head}: it has {layers[layer].num_heads}", "head")
    return PoolingParams(method="attention", layer=layer, query_head=head)


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise RequestError(f"{name} must be a whole number from 0 on, not {shown(text, 32)!r}", name, code="invalid_type")
    return int(text)
