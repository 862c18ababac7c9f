"""Sparse prefill over a paged cache: which blocks of keys a block of queries needs, and attention to these alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from headrace.kernels.sparse import triton_attention as attention_kernels
    from headrace.kernels.sparse import triton_estimate as estimate_kernels
    from headrace.kernels.sparse import triton_means as means_kernels
    from headrace.kernels.sparse import triton_select as select_kernels
else:
    attention_kernels = gpu.Late(f"{__name__}.triton_attention")
    estimate_kernels = gpu.Late(f"{__name__}.triton_estimate")
    means_kernels = gpu.Late(f"{__name__}.triton_means")
    select_kernels = gpu.Late(f"{__name__}.triton_select")

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

estimate = gpu.dispatch(reference.estimate, lambda: estimate_kernels.estimate)
select = gpu.dispatch(reference.select, lambda: select_kernels.select)
block_means = gpu.dispatch(reference.block_means, lambda: means_kernels.block_means)
select_mean = gpu.dispatch(reference.select_mean, lambda: means_kernels.select_mean)
sparse_prefill_attention = gpu.dispatch(reference.sparse_prefill_attention, lambda: attention_kernels.sparse_prefill_attention)
