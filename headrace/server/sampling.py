"""From a request body to SamplingParams."""

from __future__ import annotations

from typing import Any

from headrace.sampling_params import SamplingParams
from headrace.server.errors import ApiError, shown
from headrace.server.schema import ChatBody, CompletionBody, SamplingBody
from headrace.server.settings import ServerSettings

_OPTIONAL = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "max_tokens",
)
"""Fields that fall back to the model's defaults when a request leaves them out."""
_PLAIN = (
    "n",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "logprobs_mode",
    "prompt_logprobs",
)
_LISTS = ("allowed_token_ids", "bad_words", "stop_token_ids")


def chat_params(body: ChatBody, settings: ServerSettings, defaults: SamplingParams, has_tokenizer: bool) -> SamplingParams:
    """Raises: ApiError or RequestError (400), naming the field."""
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs", code="invalid_value")
    given = _common(body, settings)
    if body.max_completion_tokens is not None:
        if body.max_tokens not in (None, body.max_completion_tokens):
            message = f"max_completion_tokens ({body.max_completion_tokens}) and max_tokens ({body.max_tokens}) differ"
            raise ApiError(400, message, param="max_completion_tokens", code="invalid_value")
        given["max_tokens"] = body.max_completion_tokens
        if body.max_completion_tokens == 0:
            raise ApiError(400, "max_completion_tokens must be at least 1", param="max_completion_tokens", code="invalid_value")
    if body.logprobs:
        given["logprobs"] = body.top_logprobs or 0
    return _params(given, defaults, has_tokenizer)


def completion_params(
    body: CompletionBody, settings: ServerSettings, defaults: SamplingParams, has_tokenizer: bool
) -> SamplingParams:
    """Raises: ApiError or RequestError (400), naming the field."""
    if body.best_of not in (None, body.n):
        message = f"best_of ({body.best_of}) must equal n ({body.n}): samples are not drawn to be thrown away"
        raise ApiError(400, message, param="best_of", code="unsupported_parameter")
    given = _common(body, settings)
    if body.max_tokens == 0:
        # The engine always samples; the caller of such a request drops what it sampled.
        if not body.echo:
            raise ApiError(400, "max_tokens is 0, which makes sense only with echo", param="max_tokens", code="invalid_value")
        given["max_tokens"] = 1
        if body.min_tokens:
            raise ApiError(400, "min_tokens cannot be kept with max_tokens 0", param="min_tokens", code="invalid_value")
    if body.logprobs is not None:
        given["logprobs"] = body.logprobs
        if body.echo and (body.prompt_logprobs is None or 0 <= body.prompt_logprobs < body.logprobs):
            given["prompt_logprobs"] = body.logprobs
    return _params(given, defaults, has_tokenizer)


def _common(body: SamplingBody, settings: ServerSettings) -> dict[str, Any]:
    """The fields that both endpoints share, under the names of SamplingParams."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options", code="invalid_value")
    if body.stream and body.prompt_logprobs is not None:
        message = "prompt_logprobs is not supported with stream: true"
        raise ApiError(400, message, param="prompt_logprobs", code="unsupported_parameter")
    _limit("n", body.n, settings.max_n)
    given = {name: value for name in _OPTIONAL if (value := getattr(body, name)) is not None}
    given.update({name: getattr(body, name) for name in _PLAIN})
    given.update({name: value for name in _LISTS if (value := getattr(body, name)) is not None})
    if body.stop is not None:
        given["stop"] = _stops(body.stop)
    if body.logit_bias:
        _limit("logit_bias", len(body.logit_bias), settings.max_logit_bias, "entries")
        given["logit_bias"] = {_token_id(key): bias for key, bias in body.logit_bias.items()}
    return given


def _limit(name: str, value: int, limit: int, unit: str = "") -> None:
    if value > limit:
        what = f"{name} has {value} {unit}" if unit else f"{name} is {value}"
        raise ApiError(400, f"{what}, and the limit is {limit}", param=name, code="invalid_value")


def _stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ApiError(400, "stop must be a string or a list of strings", param="stop", code="invalid_type")
    return stops


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) <= 10):
        raise ApiError(
            400, f"logit_bias has the key {shown(key)!r}: keys are token ids", param="logit_bias", code="invalid_value"
        )
    return int(key)


def _params(given: dict[str, Any], defaults: SamplingParams, has_tokenizer: bool) -> SamplingParams:
    merged = {name: getattr(defaults, name) for name in defaults.__struct_fields__} | given
    if not has_tokenizer:
        merged["detokenize"] = False
    return SamplingParams(**merged)
