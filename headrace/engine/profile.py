"""How much of a GPU's memory is left for KV once the weights are in place: measured, with the largest step there can be."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from headrace.attention.backend import AttentionBackend, LayerCache, StepMetadata, distinct
from headrace.attention.context import ForwardContext
from headrace.cache.planes import allocate
from headrace.config import EngineConfig
from headrace.resolve import CUDA_SLACK
from headrace.runner.build import make_backends
from headrace.runner.model import Model


@torch.inference_mode()
def kv_room(model: Model, config: EngineConfig) -> int:
    """Bytes that the KV cache may take: ``gpu_memory_utilization`` of the GPU, less what others have of it, the weights, the
    most that a step takes beside them, and a slack for CUDA graphs and libraries' workspaces.
    """
    few = dataclasses.replace(config.cache, nbytes=config.cache.arena.reserved)
    caches = allocate(few, config.model, config.device, few.dtype)
    torch.cuda.reset_peak_memory_stats()
    _largest_step(model, config, caches, make_backends(config))
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    others = total - free - torch.cuda.memory_reserved()
    return int(config.args.gpu_memory_utilization * total) - others - peak - CUDA_SLACK


def _largest_step(model: Model, config: EngineConfig, caches: list[LayerCache], backends: list[AttentionBackend]) -> None:
    """As many tokens as a step may have, in prompts as long as may be, and logits for as many rows as may draw.

    Their KV goes nowhere, and what they see is the null block's.
    """
    tokens, longest = config.scheduler.max_num_batched_tokens, config.scheduler.max_model_len
    starts = np.append(np.arange(0, tokens, longest), tokens)
    lengths = np.diff(starts)
    rows, width = len(lengths), -(-int(lengths.max()) // config.cache.block_size)
    device = torch.device(config.device)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths.tolist()])
    nowhere = torch.full((tokens,), -1, dtype=torch.int64, device=device)
    table = torch.zeros(rows, width, dtype=torch.int32, device=device)
    step = StepMetadata(
        num_decode_rows=0,
        query_start=torch.from_numpy(starts).to(device, torch.int32),
        seq_lens=torch.from_numpy(lengths).to(device, torch.int32),
        positions=positions,
        slot_mapping=(nowhere,) * len(config.cache.groups),
        block_tables=(table,) * len(config.cache.groups),
        query_start_host=starts,
        seq_lens_host=lengths,
    )
    for backend in distinct(backends):
        backend.plan(step)
    hidden = model(torch.zeros_like(positions), positions, ForwardContext(step, caches, backends))
    logits = model.logits(hidden[: min(config.scheduler.max_num_seqs, tokens)])
    # The sampler's own copy, where rows ask for logprobs.
    logits.clone()
