"""Making SamplingParams from a request body."""

from __future__ import annotations

from typing import Any

from headrace.constrain.fields import folded, sources
from headrace.errors import RequestError, unsupported
from headrace.options import INT32_MAX, from_json
from headrace.sampling_params import SamplingParams
from headrace.server.schema import ChatBody, CompletionBody, GenerationBody
from headrace.server.state import Serving


def chat_params(body: ChatBody, serving: Serving) -> SamplingParams:
    """Raises: RequestError, naming the field of SamplingParams (see ``chat_names``) or of the body."""
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
    fields = dict(body.sampling)
    if body.max_completion_tokens is not None:
        if fields.get("max_tokens") not in (None, body.max_completion_tokens):
            message = f"max_completion_tokens ({body.max_completion_tokens}) and max_tokens ({fields['max_tokens']}) differ"
            raise RequestError(message, "max_completion_tokens")
        fields["max_tokens"] = body.max_completion_tokens
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    return _params(body, fields, serving)


def thinking_budget(body: ChatBody) -> int | None:
    """Tokens of reasoning, at most. Raises RequestError."""
    name, given = "thinking_token_budget", body.thinking_token_budget
    if given is None or given == -1:
        return None
    if not 0 <= given <= INT32_MAX:
        raise RequestError(f"{name} must be -1 (no limit) or a number of tokens, not {given}", name)
    return given


def chat_names(body: ChatBody) -> dict[str, str]:
    """Parameter of the engine -> the field of a chat request that sets it."""
    names = {"prompt": "messages", "prompt_token_ids": "messages", "logprobs": "top_logprobs", **sources(body.sampling)}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return names


def completion_names(body: CompletionBody) -> dict[str, str]:
    """Maps names like ``chat_names``, of a text completion."""
    return {"prompt_token_ids": "prompt", **sources(body.sampling)}


def completion_params(body: CompletionBody, serving: Serving) -> SamplingParams:
    """Raises: RequestError, naming the field."""
    fields = dict(body.sampling)
    if body.max_tokens is not None:
        fields["max_tokens"] = body.max_tokens
    if body.max_tokens == 0:
        # The engine always samples; the token is dropped from the answer.
        if not body.echo:
            raise RequestError("max_tokens is 0, which needs echo: true", "max_tokens")
        fields["max_tokens"] = 1
        if fields.get("min_tokens"):
            raise RequestError("min_tokens cannot be kept with max_tokens 0", "min_tokens")
    if body.logprobs is not None:
        fields["logprobs"] = body.logprobs
    params = _params(body, fields, serving)
    if body.echo and body.logprobs is not None:
        requested = params.prompt_logprobs
        if requested is None or 0 <= requested < body.logprobs:
            params = params.replace({"prompt_logprobs": body.logprobs})
    if body.best_of not in (None, params.n):
        raise unsupported("best_of", f"best_of ({body.best_of}) must equal n ({params.n}): every sample is returned")
    return params


def _params(body: GenerationBody, fields: dict[str, Any], serving: Serving) -> SamplingParams:
    """``fields`` over the model's defaults, within the server's limits."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream: true", "stream_options")
    if serving.llm.tokenizer is None:
        fields["detokenize"] = False
    serving.llm.inputs.check_sizes(fields)
    if isinstance(bias := fields.get("logit_bias"), dict):
        limit("logit_bias", len(bias), serving.settings.max_logit_bias, "max_logit_bias")
    params = serving.llm.inputs.default_sampling.replace(from_json(SamplingParams, folded(fields)))
    if body.stream and "prompt_logprobs" in fields:
        raise unsupported("prompt_logprobs", "prompt_logprobs is not supported with stream: true")
    limit("n", params.n, serving.settings.max_n, "max_n")
    return params


def limit(name: str, value: int, most: int, option: str) -> None:
    """Raises RequestError if a number, or the length of a list, is above what an option of the server allows."""
    if value > most:
        raise RequestError(f"{name}: {value} is above the limit of {most} ({option})", name)
