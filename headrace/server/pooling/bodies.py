"""Bodies of requests for embeddings and scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from headrace.options import INT32_MAX, OptionSpec
from headrace.server.schema import PROMPTS, RequestBody

_DOCUMENT: Mapping[str, Any] = {
    "anyOf": [{"type": "string"}, {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}]
}
_DOCUMENTS: Mapping[str, Any] = {"type": "array", "items": _DOCUMENT, "minItems": 1}
_SIDE: Mapping[str, Any] = {"anyOf": [*_DOCUMENT["anyOf"], _DOCUMENTS]}


class PooledBody(RequestBody, frozen=True, kw_only=True):
    """Fields that all of them share."""

    model: str | None = None
    """Name of the model or of an adapter, one of /v1/models. Default: the model that is served."""
    user: str | None = None
    """Session of the request for --dp-routing-policy session, without the header X-Session-ID."""
    priority: int = 0
    """A lower value runs first under --policy priority."""
    cache_salt: str | None = None
    """Cached prefixes are shared only among requests with the same salt."""


class InputBody(PooledBody, frozen=True, kw_only=True):
    """Fields of requests for what is pooled of texts."""

    input: Annotated[Any, OptionSpec(schema=PROMPTS)]
    """A text or several, or token ids of one or of several."""
    encoding_format: Literal["float", "base64"] = "float"
    """Form of the numbers: a list, or the base64 of little-endian float32."""
    input_type: Literal["query", "document"] | None = None
    """Put the model's prompt for queries or for documents before each text."""
    instruction: Annotated[str | None, OptionSpec(min=1)] = None
    """Task of the queries, for models that take an instruction."""
    prompt_name: Annotated[str | None, OptionSpec(min=1)] = None
    """Name of one of the model's prompts, to go before each text."""
    add_special_tokens: bool = True
    """Add the tokenizer's special tokens, whose last one many embedders pool."""


class EmbeddingsBody(InputBody, frozen=True, kw_only=True):
    dimensions: Annotated[int | None, OptionSpec(min=1, max=INT32_MAX)] = None
    """Numbers that are kept of an embedding, from its first, before it is normalised. For Matryoshka models."""
    normalize: bool | None = None
    """Scale embeddings to length 1. Default: as the model's files say."""


class PairsBody(PooledBody, frozen=True, kw_only=True):
    """Fields of requests for scores of pairs."""

    instruction: Annotated[str | None, OptionSpec(min=1)] = None
    """Task for which documents are judged, for models whose template has a place for it."""
    max_tokens_per_query: Annotated[int | None, OptionSpec(min=1, max=INT32_MAX)] = None
    """Tokens that are kept of a query, from its first. Default: all."""
    max_tokens_per_doc: Annotated[int | None, OptionSpec(min=1, max=INT32_MAX)] = None
    """Tokens that are kept of a document, from its first. Default: what fits into the context."""


class RerankBody(PairsBody, frozen=True, kw_only=True):
    query: str
    """Text that the documents are compared with."""
    documents: Annotated[Any, OptionSpec(schema=_DOCUMENTS)]
    """Texts, as strings or as objects with text."""
    top_n: Annotated[int | None, OptionSpec(min=1, max=INT32_MAX)] = None
    """Number of results, the best ones. Default: all."""
    return_documents: bool = True
    """Repeat each document in its result."""


class ScoreBody(PairsBody, frozen=True, kw_only=True):
    text_1: Annotated[Any, OptionSpec(schema=_SIDE)] = None
    """One text for all of text_2, or as many texts."""
    text_2: Annotated[Any, OptionSpec(schema=_SIDE)] = None
    """Texts to compare with."""
    queries: Annotated[Any, OptionSpec(schema=_SIDE)] = None
    """Newer name of text_1."""
    documents: Annotated[Any, OptionSpec(schema=_SIDE)] = None
    """Newer name of text_2."""


class OllamaPooledBody(RequestBody, frozen=True, kw_only=True):
    """Fields that /api/embed and /api/embeddings share."""

    model: str
    """Name of the model, one of /api/tags; `:latest` behind it is left out."""
    options: Annotated[Any, OptionSpec(schema={"type": "object"})] = None
    """May have `num_ctx` alone: embeddings are not sampled."""
    keep_alive: Annotated[Any, OptionSpec(schema={"anyOf": [{"type": "string"}, {"type": "number"}]})] = None
    """Time for which the model stays loaded after the answer, where the server has several models."""


class OllamaEmbedBody(OllamaPooledBody, frozen=True, kw_only=True):
    input: Annotated[Any, OptionSpec(schema={"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]})]
    """A text or several. Their embeddings have length 1."""
    truncate: bool = False
    """May only be false: a text that is longer than the context is refused."""
    dimensions: Annotated[int | None, OptionSpec(min=1, max=INT32_MAX)] = None
    """Numbers that are kept of an embedding, from its first. For Matryoshka models."""


class OllamaEmbeddingsBody(OllamaPooledBody, frozen=True, kw_only=True):
    """Body of the older endpoint."""

    prompt: str
    """A text. Its embedding is not scaled."""
