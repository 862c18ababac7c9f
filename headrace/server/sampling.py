"""Making SamplingParams from a request body."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from headrace.constrain.fields import folded, sources
from headrace.errors import RequestError, did_you_mean, unknown, unsupported, wrong_type
from headrace.options import INT32_MAX, from_json, is_one_of, options
from headrace.sampling_params import SamplingParams
from headrace.server.errors import shown
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
    _check_sizes(fields, serving)
    params = serving.llm.inputs.default_sampling.replace(from_json(SamplingParams, folded(fields)))
    if body.stream and "prompt_logprobs" in fields:
        raise unsupported("prompt_logprobs", "prompt_logprobs is not supported with stream: true")
    limit("n", params.n, serving.settings.max_n, "max_n")
    return params


_RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "max_new_tokens": "max_tokens",
        "min_new_tokens": "min_tokens",
        "sampling_seed": "seed",
        "no_stop_trim": "include_stop_str_in_output",
    }
)
"""SGLang's name of a sampling parameter -> ours."""
_SHARED = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "n", "stop"),
        *("stop_token_ids", "ignore_eos", "skip_special_tokens", "logit_bias", "json_schema", "regex", "ebnf"),
    }
)
"""Names that SGLang's sampling parameters and ours have in common."""
_MASK = "return_top_p_token_ids"
_WITHOUT_EFFECT: Mapping[str, Collection[Any]] = MappingProxyType(
    {
        "spaces_between_special_tokens": (True, False),
        # When and whether text is made: the answer is in tokens, and has each once.
        "output_kind": (0, 1, 2),
        "detokenize": (True, False),
        "flat_logprobs": (True, False),
    }
)
"""Parameters that pass and change nothing, and their values."""


def sglang_params(given: Any, where: str, serving: Serving, scores: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters by SGLang's names; those that are left out are neutral.

    Args:
        scores: parameters of reports, which SGLang has beside them.

    Raises:
        RequestError, naming the field as one of ``where``.
    """
    fields: dict[str, Any] = {**scores}
    known = {*_RENAMED, *_SHARED, "spaces_between_special_tokens", "custom_params", "structural_tag"}
    for name, value in _given(given, where, known).items():
        if name == "custom_params":
            fields["return_sampling_mask"] = _wants_mask(value, f"{where}.{name}")
        elif name == "structural_tag":
            fields["structured_outputs"] = {name: value}
        else:
            fields[_RENAMED.get(name, name)] = value
    return _rollout_params(fields, where, rollout_names(given, where, sglang=True), serving)


def _wants_mask(custom_params: Any, where: str) -> bool:
    """Whether slime, among parameters of a logits processor, asks for the tokens that were left to sample from."""
    wanted = custom_params.get(_MASK) if isinstance(custom_params, dict) and custom_params.keys() <= {_MASK} else None
    if not isinstance(wanted, bool):
        message = f"{where} may only be {{{_MASK!r}: true}}: the server runs no code of its clients"
        raise unsupported(where, message.replace("'", '"'))
    return wanted


def inference_params(given: Any, where: str, serving: Serving, *, return_routed_experts: bool) -> SamplingParams:
    """Sampling parameters by vLLM's names; those that are left out are neutral.

    Raises:
        RequestError, naming the field as one of ``where``.
    """
    fields = _given(given, where, {*options(SamplingParams), *_WITHOUT_EFFECT} - {"return_routed_experts"})
    # Text is made for stop strings alone.
    fields |= {"detokenize": bool(fields.get("stop")), "return_routed_experts": return_routed_experts}
    return _rollout_params(fields, where, rollout_names(given, where), serving)


def rollout_names(given: Any, where: str, *, sglang: bool = False) -> dict[str, str]:
    """Maps names like ``chat_names``, of an object of sampling parameters. ``sglang``: it has SGLang's names."""
    names = {name: name for name in options(SamplingParams)}
    if sglang:
        names |= {ours: theirs for theirs, ours in _RENAMED.items()} | {"structured_outputs": "structural_tag"}
        names |= {"return_sampling_mask": "custom_params"}
        names |= {"structured_outputs.structural_tag": "structural_tag"} | sources(given if isinstance(given, dict) else {})
    return {name: f"{where}.{theirs}" for name, theirs in names.items()}


def _given(given: Any, where: str, known: Collection[str]) -> dict[str, Any]:
    """The parameters that are not null, without those that have no effect."""
    if not isinstance(given, dict):
        raise wrong_type(where, "an object")
    fields = {name: value for name, value in given.items() if value is not None}
    for name in [name for name in fields if name not in known]:
        raise unknown(f"{where}.{shown(name)}", did_you_mean(shown(name), known))
    for name in [name for name in _WITHOUT_EFFECT if name in fields]:
        if not is_one_of(fields.pop(name), _WITHOUT_EFFECT[name]):
            raise wrong_type(f"{where}.{name}", " or ".join(map(str, _WITHOUT_EFFECT[name])).lower())
    return fields


def _rollout_params(fields: dict[str, Any], where: str, names: Mapping[str, str], serving: Serving) -> SamplingParams:
    """Parameters of a request for tokens. The model's defaults do not apply to it: its caller computes with what it sampled
    from. ``names``: as ``rollout_names`` gives them."""
    if serving.llm.tokenizer is None:
        fields["detokenize"] = False
    try:
        _check_sizes(fields, serving)
        params = SamplingParams(**from_json(SamplingParams, folded(fields)))
        limit("n", params.n, serving.settings.max_n, "max_n")
    except RequestError as error:
        error.param = names.get(error.param or "", f"{where}.{error.param}" if error.param else where)
        raise
    return params


def _check_sizes(fields: Mapping[str, Any], serving: Serving) -> None:
    """Raises RequestError for a list that is too long: to be called before anything else reads the lists."""
    serving.llm.inputs.check_sizes(fields)
    if isinstance(bias := fields.get("logit_bias"), dict):
        limit("logit_bias", len(bias), serving.settings.max_logit_bias, "max_logit_bias")


def limit(name: str, value: int, most: int, option: str) -> None:
    """Raises RequestError if a number, or the length of a list, is above what an option of the server allows."""
    if value > most:
        raise RequestError(f"{name}: {value} is above the limit of {most} ({option})", name)
