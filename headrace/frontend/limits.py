"""Limits of an engine's arguments on sampling parameters, whatever the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.config import EngineArgs
from headrace.errors import RequestError
from headrace.sampling_params import SamplingParams
from headrace.text.stops import check_stops

_LIST_LIMITS = {
    "stop": "max_stop_seqs_num",
    "bad_words": "max_bad_words_num",
    "stop_token_ids": "max_stop_token_ids",
    "allowed_token_ids": "max_allowed_token_ids",
}
"""Parameter -> the option that limits its length."""


def check_limits(params: SamplingParams, args: EngineArgs, vocab_size: int | None = None) -> None:
    """``vocab_size``: None: the model is not known yet, and limits on the whole vocabulary are left for later.

    Raises:
        RequestError: a parameter passes a limit.
    """
    check_sizes({name: getattr(params, name) for name in _LIST_LIMITS}, args)
    for name in ("logprobs", "prompt_logprobs"):
        _check_logprobs(name, getattr(params, name), args.max_logprobs, vocab_size)
    check_stops(params.stop or (), args)
    if params.return_routed_experts and not args.enable_return_routed_experts:
        message = "return_routed_experts needs an engine with enable_return_routed_experts (--enable-return-routed-experts)"
        raise RequestError(message, "return_routed_experts")


def check_sizes(fields: Mapping[str, Any], args: EngineArgs) -> None:
    """Raises RequestError for parameters with too long a list: to be called before anything else reads the lists."""
    for name, option in _LIST_LIMITS.items():
        value, most = fields.get(name), getattr(args, option)
        if isinstance(value, list) and len(value) > most:
            message = f"{name} has {len(value)} entries; at most {most} are allowed ({option})"
            raise RequestError(message, name)


def _check_logprobs(name: str, count: int | None, limit: int, vocab_size: int | None) -> None:
    requested = vocab_size if count == -1 else count
    if requested is None or limit == -1 or requested <= limit:
        return
    what = "the whole vocabulary" if count == -1 else str(count)
    raise RequestError(f"{name} asks for {what}, and this engine gives at most {limit} (max_logprobs)", name)
