"""Batch-invariant attention of decode rows over caches in bfloat16 on Hopper GPUs: the kernel of ``ordered.cu``. Its reference,
bit for bit, is ``headrace.kernels.attention.triton`` in the tiles of ``tiling.batch_invariant_tiling``.
"""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path

import torch

from headrace.kernels import support
from headrace.kernels.attention.cuda_decode import MAX_GROUP, PAGE, WIDTH
from headrace.kernels.cuda_launch import CudaKernel, refusals, tensor_map
from headrace.model_spec import AttentionSpec

_SOURCE = Path(__file__).with_name("ordered.cu")
_ALIGNMENT, _LINES = 1024, 4
"""Alignment of shared memory in bytes, and lines of 128 bytes of a token's key and value."""
_COUNTERS = 1 << 16
"""Rows times KV heads, at most: each has a counter of its splits that are done."""
_SIDE_BY_SIDE = 2
"""Blocks for each multiprocessor, below which splits of a row have blocks of their own."""


def takes(num_rows: int, spec: AttentionSpec, rows: torch.Tensor, q: torch.Tensor, sinks: torch.Tensor | None) -> bool:
    """Whether the kernel attends in a layer.

    Args:
        num_rows: of the step.
        rows: the layer's cache, ``[pages, tokens, kv_heads, N]``.
        q: ``[R, num_heads, d]``
    """
    if not q.dtype == rows.dtype == torch.bfloat16 or rows.ndim != 4 or refusals(rows.device):
        return False
    _, tokens, kv_heads, width = rows.shape
    sizes = (spec.head_dim, spec.v_head_dim, tokens, width) == (WIDTH, WIDTH, PAGE, 2 * WIDTH) and spec.group_size <= MAX_GROUP
    plain = spec.window is None and spec.soft_cap is None and sinks is None
    strides = all(not stride % 8 for stride in (*rows.stride()[:3], q.stride(0))) and q.stride()[1:] == (WIDTH, 1)
    whole = strides and rows.stride(3) == 1 and not rows.data_ptr() % 16 and not q.data_ptr() % 4
    return sizes and plain and whole and num_rows * kv_heads <= _COUNTERS


def decode_attention(
    q: torch.Tensor,
    rows: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    workspace: torch.Tensor,
    *,
    scale: float,
    splits: int,
    split_tokens: int,
    early: bool,
) -> None:
    """Attends for one token of each of R rows, whose keys and values are in the cache.

    Args:
        q: ``[R, num_heads, WIDTH]``, normed and rotated; heads contiguous.
        rows: ``[pages, PAGE, kv_heads, 2 * WIDTH]``: keys, then values of each head; last axis contiguous.
        block_tables: ``[R, B]`` int32.
        seq_lens: ``[R]`` int32 with the new tokens; a row of length 0 comes out as 0.
        out: ``[R, num_heads, WIDTH]`` contiguous; filled.
        workspace: float32, at least ``partial_size`` numbers of a tiling with as many splits.
        splits: of the longest row.
        split_tokens: a multiple of 64.
        early: as for ``cuda_decode.decode_attention``, but for the new tokens' places in their pages.
    """
    num_rows, num_heads, _ = out.shape
    kv_heads = rows.shape[2]
    programs, multiprocessors = num_rows * kv_heads, support.resources(out.device).multiprocessors
    side_by_side = max(1, min(splits, _SIDE_BY_SIDE * multiprocessors // programs))
    kernel = _kernel(num_heads // kv_heads, 12 if programs <= multiprocessors else 8)
    # Pages, heads, lines of keys and values, tokens, and the channels of a line.
    lines = rows.view(*rows.shape[:3], _LINES, WIDTH // 2).permute(0, 2, 3, 1, 4)
    # As Triton's kernel, in float32.
    factor = _single(_single(scale) * _single(math.log2(math.e)))
    turns = support.counters("ordered", out.device, _COUNTERS)
    kernel.launch(
        (kv_heads, num_rows, side_by_side), tensor_map(lines, _LINES, PAGE, WIDTH // 2, promotion=128),
        q.data_ptr(), out.data_ptr(), workspace.data_ptr(), turns.data_ptr(), block_tables.data_ptr(),
        seq_lens.data_ptr(), factor, block_tables.stride(0), q.stride(0), splits, split_tokens // PAGE, int(early),
    )  # fmt: skip


def _single(x: float) -> float:
    return ctypes.c_float(x).value


@functools.cache
def _kernel(group: int, stages: int) -> CudaKernel:
    macros = {"GROUP": group, "STAGES": stages}
    shared = _ALIGNMENT + stages * (PAGE * WIDTH * 4 + 8) + 8 * 144 + 128 + 8 * (WIDTH * 2 + 16)
    return CudaKernel(_SOURCE, "ordered_attention", "MPPPPPPfiiiii", macros, 128, shared)
