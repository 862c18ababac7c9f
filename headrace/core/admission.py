"""Admission: refuses requests that the scheduler can never serve, or not now. InputProcessor has checked everything else."""

from __future__ import annotations

from headrace.config import SchedulerConfig
from headrace.core.request import Request
from headrace.core.sparse import SparsePrompt
from headrace.errors import QueueFullError, RequestError
from headrace.kv import KVCacheManager


def check_request(request: Request, config: SchedulerConfig, kv: KVCacheManager, num_waiting: int) -> None:
    """Checks a request against the step budget, the KV cache and the queue.

    Raises:
        RequestError: the request can never be served; the error names the parameter.
        QueueFullError: the queue is full.
    """
    _check_items(request, config)
    _check_sparse(request, config)
    _check_cache(request, config, kv)
    n = request.sampling.n
    if n > config.max_queue_len:
        raise RequestError(f"n is {n}, and the queue holds at most {config.max_queue_len} sequences (max_queue_len)", "n")
    if num_waiting + n > config.max_queue_len:
        raise QueueFullError(f"{num_waiting} sequences wait in a queue of at most {config.max_queue_len}; try again later")


def _check_items(request: Request, config: SchedulerConfig) -> None:
    for index, item in enumerate(request.items):
        where, length = f"items[{index}] ({item.start}, {item.end})", item.end - item.start
        if item.atomic and length > config.max_num_batched_tokens:
            raise RequestError(
                f"{where} is atomic and has {length} tokens; a step takes at most {config.max_num_batched_tokens} "
                "(max_num_batched_tokens)",
                "items",
            )
        if item.encoder_tokens > config.max_num_encoder_tokens:
            raise RequestError(
                f"{where} has {item.encoder_tokens} encoder tokens; a step takes at most {config.max_num_encoder_tokens} "
                "(max_num_encoder_tokens)",
                "items",
            )


def _check_sparse(request: Request, config: SchedulerConfig) -> None:
    if not request.sampling.sparse_prefill:
        return
    if config.sparse is None:
        raise RequestError(
            "sparse_prefill is true, and prompts of this server attend densely (--sparse-prefill)", "sparse_prefill"
        )
    if request.items:
        raise RequestError("sparse_prefill is for prompts of text: images and other items attend densely", "sparse_prefill")


def _check_cache(request: Request, config: SchedulerConfig, kv: KVCacheManager) -> None:
    longest = max((item.end - item.start for item in request.items if item.atomic), default=1)
    if sparse := SparsePrompt.of(request, config.sparse):
        longest = sparse.least(0)
    # Samples fork up to a block before the prompt's end, and window groups keep what the fork sees until then.
    fork = kv.block_size if request.sampling.n > 1 else 0
    if reason := kv.too_small_for(len(request.prompt_token_ids), longest + fork):
        raise RequestError(f"the prompt can never fit in the KV cache: {reason}", "prompt")
