"""The largest step that a runner may get, for measuring the memory that steps take."""

from __future__ import annotations

import numpy as np
import torch

from headrace.attention.backend import StepMetadata
from headrace.attention.sparse_rows import SparseRows
from headrace.config import EngineConfig
from headrace.core.plan import NewSequence, Row, StepPlan, pack_tokens
from headrace.runner.parts.sparse import SparseTables
from headrace.runner.slots import RowArrays
from headrace.sampling_params import SamplingParams


def largest_step(config: EngineConfig, tokens: int | None = None) -> tuple[StepMetadata, torch.Tensor]:
    """The step with most tokens, and their positions. Its prompts attend sparsely where prompts may.

    ``tokens``: number of tokens in place of the most.
    """
    tokens, longest = tokens or config.scheduler.most_tokens, config.scheduler.max_model_len
    if config.sparse is not None and config.sparse.routed:
        longest = min(longest, config.sparse.max_exact_tokens)
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
        slot_mapping=(nowhere,) * len(config.cache.groups),
        block_tables=(table,) * len(config.cache.groups),
        query_start_host=starts,
        seq_lens_host=lengths,
        sparse=_sparse_rows(config, lengths.tolist(), device),
    )
    return step, positions


def _sparse_rows(config: EngineConfig, lengths: list[int], device: torch.device) -> SparseRows | None:
    """Whole prompts of the given lengths; None: they attend densely."""
    if config.sparse is None or len(lengths) > config.scheduler.max_num_seqs:
        return None
    tables = SparseTables(config, config.sparse, device)
    sampling = SamplingParams()
    # The tables read only the length of a prompt.
    prompts = [
        NewSequence(slot, slot, pack_tokens(()), length, sampling, 0, 0, [], None, sparse=b"")
        for slot, length in enumerate(lengths)
    ]
    tables.begin(StepPlan(0, (), tuple(prompts), (), 0))
    rows = tuple(Row(slot, slot, 0, length, 0, ()) for slot, length in enumerate(lengths))
    return tables.rows(RowArrays(StepPlan(0, (), (), rows, 0)))
