"""POST /v1/embeddings, /pooling, /rerank, /v1/rerank, /v2/rerank, /score, /v1/score"""

from __future__ import annotations

import base64
import time
import uuid
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.errors import RequestError, missing, wrong_type
from headrace.frontend.pooling import EmbedOptions, ScoreOptions
from headrace.outputs import PoolingRequestOutput, ScoringOutput
from headrace.server.pooling.bodies import EmbeddingsBody, InputBody, PairsBody, RerankBody, ScoreBody
from headrace.server.pooling.run import item, pooled, raw, usage
from headrace.server.prompts import parse_prompts
from headrace.server.request import posts
from headrace.server.sampling import limit
from headrace.server.state import Serving

router = APIRouter()


@posts(router, "/v1/embeddings", kind=EmbeddingsBody)
async def embeddings(request: Request, state: Serving, body: EmbeddingsBody) -> Response:
    """Embeddings of one or more texts, in their order."""
    name = f"embd-{uuid.uuid4().hex}"
    options = EmbedOptions(**_input_options(body), dimensions=body.dimensions, normalize=body.normalize)
    return await pooled(
        request,
        state,
        body,
        name,
        lambda inputs, who: inputs.embed(_inputs(state, body), name, options, param="input", **who),
        lambda results: _list(state, body, name, "embedding", results, lambda output: output.embedding),
    )


@posts(router, "/pooling", kind=InputBody)
async def pooling(request: Request, state: Serving, body: InputBody) -> Response:
    """The pooled numbers of one or more texts as the engine computes them: hidden states, or logits of classes."""
    name, options = f"pool-{uuid.uuid4().hex}", EmbedOptions(**_input_options(body))
    return await pooled(
        request,
        state,
        body,
        name,
        lambda inputs, who: inputs.encode(_inputs(state, body), name, options, param="input", **who),
        lambda results: _list(state, body, name, "pooling", results, lambda output: output.data),
    )


@posts(router, "/rerank", "/v1/rerank", "/v2/rerank", kind=RerankBody)
async def rerank(request: Request, state: Serving, body: RerankBody) -> Response:
    """Documents by their relevance to a query, the best ones first."""
    documents, name = _texts(state, "documents", body.documents), f"rerank-{uuid.uuid4().hex}"

    def answer(results: list[PoolingRequestOutput[ScoringOutput]]) -> dict[str, Any]:
        entries = []
        for index, result in enumerate(results):
            score, more = item(result, lambda output: output.score)
            document = {"document": {"text": documents[index]}} if body.return_documents else {}
            entries.append({"index": index, "relevance_score": score, **document, **more})
        entries.sort(key=lambda entry: -np.inf if entry["relevance_score"] is None else entry["relevance_score"], reverse=True)
        return {
            "id": name,
            "model": state.model.called(body.model),
            "results": entries[: body.top_n],
            "usage": usage(results),
        }

    return await pooled(
        request,
        state,
        body,
        name,
        lambda inputs, who: inputs.score(
            [body.query], documents, name, _pair_options(body), params=("query", "documents"), **who
        ),
        answer,
    )


@posts(router, "/score", "/v1/score", kind=ScoreBody)
async def score(request: Request, state: Serving, body: ScoreBody) -> Response:
    """Scores of pairs of texts, in their order."""
    first, second = _side(body, "text_1", "queries"), _side(body, "text_2", "documents")
    left, right = _texts(state, first, getattr(body, first)), _texts(state, second, getattr(body, second))
    name = f"score-{uuid.uuid4().hex}"

    def answer(results: list[PoolingRequestOutput[ScoringOutput]]) -> dict[str, Any]:
        data = []
        for index, result in enumerate(results):
            value, more = item(result, lambda output: output.score)
            data.append({"index": index, "object": "score", "score": value, **more})
        return {**_head(state, body.model, name), "data": data, "usage": usage(results)}

    return await pooled(
        request,
        state,
        body,
        name,
        lambda inputs, who: inputs.score(left, right, name, _pair_options(body), params=(first, second), **who),
        answer,
    )


def _head(state: Serving, model: str | None, name: str) -> dict[str, Any]:
    return {"id": name, "object": "list", "created": int(time.time()), "model": state.model.called(model)}


def _list(
    state: Serving, body: InputBody, name: str, kind: str, results: list[PoolingRequestOutput[Any]], numbers: Any
) -> dict[str, Any]:
    """The answer with a list of vectors."""
    field = "embedding" if kind == "embedding" else "data"

    def shaped(output: Any) -> Any:
        values = numbers(output)
        if body.encoding_format == "base64":
            return base64.b64encode(np.asarray(values, dtype="<f4").tobytes()).decode()
        return raw(values)

    data = []
    for index, result in enumerate(results):
        value, more = item(result, shaped)
        data.append({"index": index, "object": kind, field: value, **more})
    return {**_head(state, body.model, name), "data": data, "usage": usage(results)}


def _input_options(body: InputBody) -> dict[str, Any]:
    names = ("input_type", "instruction", "prompt_name", "add_special_tokens")
    return {name: getattr(body, name) for name in names}


def _pair_options(body: PairsBody) -> ScoreOptions:
    return ScoreOptions(
        instruction=body.instruction,
        max_tokens_per_query=body.max_tokens_per_query,
        max_tokens_per_doc=body.max_tokens_per_doc,
    )


def _inputs(state: Serving, body: InputBody) -> list[str | list[int]]:
    return parse_prompts(body.input, state.settings.max_prompts, "input")


def _side(body: ScoreBody, name: str, newer: str) -> str:
    """The field of one side of the pairs."""
    given = [field for field in (name, newer) if getattr(body, field) is not None]
    if len(given) == 2:
        raise RequestError(f"give {name} or {newer}, not both: they are names of one field", newer)
    if not given:
        raise missing(name)
    return given[0]


def _texts(state: Serving, name: str, value: Any) -> list[str]:
    """Strings, or objects with text, alone or in a list.

    Raises:
        RequestError: names the entry that is of another type.
    """
    values = value if isinstance(value, list) else [value]
    if not values:
        raise RequestError(f"{name} is an empty list", name)
    limit(name, len(values), state.settings.max_prompts, "max_prompts")
    texts = []
    for index, entry in enumerate(values):
        text = entry.get("text") if isinstance(entry, dict) and entry.keys() == {"text"} else entry
        if not isinstance(text, str):
            raise wrong_type(f"{name}[{index}]" if isinstance(value, list) else name, "a string, or an object with text alone")
        texts.append(text)
    return texts
