"""Sparse prefill over a paged cache: which blocks of keys a block of queries needs, and attention to these alone."""

from __future__ import annotations

from headrace.kernels import gpu
from headrace.kernels.sparse import reference
from headrace.kernels.sparse.reference import (
    BLOCK,
    ELSEWHERE,
    BlockMeans,
    KeyCopies,
    PagedKV,
    PromptRows,
    first_query_blocks,
    num_query_blocks,
)

__all__ = [
    "BLOCK",
    "BlockMeans",
    "ELSEWHERE",
    "KeyCopies",
    "PagedKV",
    "PromptRows",
    "block_means",
    "estimate",
    "first_query_blocks",
    "num_query_blocks",
    "select",
    "select_mean",
    "sparse_prefill_attention",
]

estimate = gpu.dispatch(reference.estimate, "triton_estimate")
select = gpu.dispatch(reference.select, "triton_select")
block_means = gpu.dispatch(reference.block_means, "triton_means")
select_mean = gpu.dispatch(reference.select_mean, "triton_means")
sparse_prefill_attention = gpu.dispatch(reference.sparse_prefill_attention, "triton_attention")
