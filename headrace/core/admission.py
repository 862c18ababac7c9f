"""Admission: what is refused when a request is added, rather than failing later."""

from __future__ import annotations

from headrace.config import SchedulerConfig
from headrace.core.request import Request
from headrace.errors import QueueFullError, RequestError
from headrace.kv import KVCacheManager


def check_request(request: Request, config: SchedulerConfig, kv: KVCacheManager, num_waiting: int) -> None:
    """Raises an error that names the parameter if the request can never be served, or not now.

    Raises:
        RequestError: it can never be served.
        QueueFullError: the queue is full.
    """
    _check_lengths(request, config)
    _check_spans(request, config)
    _check_cache(request, kv)
    n = request.sampling.n
    if n > config.max_queue_len:
        raise RequestError(f"n is {n}, but only {config.max_queue_len} sequences can wait (max_queue_len)", "n")
    if num_waiting + n > config.max_queue_len:
        raise QueueFullError(f"{num_waiting} sequences are waiting already, of at most {config.max_queue_len}; try again later")


def _check_lengths(request: Request, config: SchedulerConfig) -> None:
    num_prompt = len(request.prompt_token_ids)
    if num_prompt == 0:
        raise RequestError("the prompt has no tokens", "prompt")
    if num_prompt >= config.max_model_len:
        raise RequestError(
            f"the prompt has {num_prompt} tokens; with at least one token to generate "
            f"the context of {config.max_model_len} tokens (max_model_len) is too short",
            "prompt",
        )
    if request.max_tokens < 1:
        raise RequestError(f"max_tokens must be at least 1, not {request.max_tokens}", "max_tokens")


def _check_spans(request: Request, config: SchedulerConfig) -> None:
    num_prompt, before = len(request.prompt_token_ids), 0
    for start, end in request.spans:
        if not before <= start < end <= num_prompt:
            raise RequestError(
                f"span ({start}, {end}) must be a range of the prompt's {num_prompt} tokens, after the span before it", "spans"
            )
        if end - start > config.max_num_batched_tokens:
            raise RequestError(
                f"span ({start}, {end}) has {end - start} tokens; a step takes at most {config.max_num_batched_tokens} "
                "(max_num_batched_tokens), and spans are never cut",
                "spans",
            )
        before = end


def _check_cache(request: Request, kv: KVCacheManager) -> None:
    longest = max((end - start for start, end in request.spans), default=1)
    # Samples fork up to a block before the prompt's end, and windows stay behind the fork until then.
    fork = kv.block_size if request.sampling.n > 1 else 0
    if reason := kv.too_small_for(len(request.prompt_token_ids), longest + fork):
        raise RequestError(f"the prompt can never fit in the KV cache: {reason}", "prompt")
