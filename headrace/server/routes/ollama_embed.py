"""POST /api/embed, /api/embeddings: embeddings by Ollama's API."""

from __future__ import annotations

import time
import uuid
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from headrace.errors import EngineError, unsupported
from headrace.frontend.pooling import EmbedOptions
from headrace.outputs import EmbeddingOutput, PoolingRequestOutput
from headrace.server.errors import JSON
from headrace.server.pooling.bodies import EmbeddingsBody, OllamaEmbedBody, OllamaEmbeddingsBody, OllamaPooledBody
from headrace.server.pooling.run import pooled, raw, usage
from headrace.server.prompts import parse_prompts
from headrace.server.request import posts
from headrace.server.routes.ollama import known_name
from headrace.server.shape.ollama import check_context, duration
from headrace.server.shape.turns import Kind
from headrace.server.state import Serving

router = APIRouter()

_TEXTS = Kind(str | list[str])


@posts(router, "/api/embed", kind=OllamaEmbedBody)
async def embed(request: Request, state: Serving, body: OllamaEmbedBody) -> Response:
    """Embeddings of one or more texts, in their order."""
    started = time.monotonic()
    texts = _TEXTS.checked(body.input, "input")
    if body.truncate:
        raise unsupported("truncate", "truncate may only be false: a text that is longer than the context is refused")
    if not texts:
        known_name(state, body.model)
        return JSON({"model": body.model, "embeddings": []})

    def answer(results: list[PoolingRequestOutput[EmbeddingOutput]]) -> dict[str, Any]:
        nanoseconds = int((time.monotonic() - started) * 1e9)
        times = {"total_duration": nanoseconds, "load_duration": 0, "prompt_eval_count": usage(results)["prompt_tokens"]}
        return {"model": body.model, "embeddings": [raw(_numbers(result)) for result in results], **times}

    options = EmbedOptions(dimensions=body.dimensions, normalize=True)
    return await _embedded(request, state, body, ("input", texts), options, answer)


@posts(router, "/api/embeddings", kind=OllamaEmbeddingsBody)
async def embeddings(request: Request, state: Serving, body: OllamaEmbeddingsBody) -> Response:
    """The embedding of a text: the older endpoint."""
    return await _embedded(
        request,
        state,
        body,
        ("prompt", body.prompt),
        EmbedOptions(normalize=False),
        lambda results: {"embedding": raw(_numbers(results[0]))},
    )


async def _embedded(
    request: Request,
    state: Serving,
    body: OllamaPooledBody,
    texts: tuple[str, str | list[str]],
    options: EmbedOptions,
    answer: Any,
) -> Response:
    """``texts``: the name of their field, and them."""
    duration(body.keep_alive)
    check_context(body.options, state)
    name, (field, value) = f"embd-{uuid.uuid4().hex}", texts
    asked = EmbeddingsBody(model=known_name(state, body.model), input=value)
    prompts = parse_prompts(value, state.settings.max_prompts, field)
    return await pooled(
        request, state, asked, name, lambda inputs, who: inputs.embed(prompts, name, options, param=field, **who), answer
    )


def _numbers(result: PoolingRequestOutput[EmbeddingOutput]) -> list[float]:
    """Raises: EngineError: it failed. The answer has no place for the error of one text."""
    if result.outputs is None:
        raise EngineError(str(result.error))
    return result.outputs.embedding
