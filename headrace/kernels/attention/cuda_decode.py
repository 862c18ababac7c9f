"""Attention of decode rows over caches of 16 bits on Hopper GPUs: the kernel of ``decode.cu``. Reference:
``headrace.kernels.attention.reference``, behind ``headrace.kernels.qkv.reference``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path

import torch

from headrace.kernels import support
from headrace.kernels.attention.unfinished import Unfinished
from headrace.kernels.cuda_launch import CudaKernel, refusals, tensor_map
from headrace.model_spec import AttentionSpec

WIDTH, PAGE = 128, 16
"""Channels of a head, and tokens of a page."""
MAX_GROUP = 8
MIN_ROWS = 2
"""Rows from which the kernel is faster than Triton's. One row is too behind a projection that takes all shared memory itself:
elsewhere its blocks, which need much of it, would wait for a multiprocessor to be empty."""
_SOURCE = Path(__file__).with_name("decode.cu")
_KINDS = {torch.bfloat16: 0, torch.float16: 1}
_ALIGNMENT, _LINES = 1024, 4
"""Alignment of shared memory in bytes, and lines of 128 bytes of a token's key and value."""


@dataclasses.dataclass(frozen=True)
class DecodeTiling:
    """Sizes of a block."""

    warps: int
    stages: int
    """Pages of a warp in flight."""
    split: int
    """Blocks that may share the pages of a row's KV head; as a cluster, 1 to 8."""
    least: int = 1
    """Pages of each warp, with which a further block joins."""
    gathers: bool = False
    """Blocks are no cluster, and meet in the memory of the device."""

    def shared(self, group: int) -> int:
        """Bytes of shared memory of a block."""
        ring = self.warps * self.stages * (PAGE * WIDTH * 4 + 8)
        sums = self.split * (group * WIDTH * 4 + 64) if self.split > 1 and not self.gathers else 0
        return _ALIGNMENT + ring + sums + MAX_GROUP * (WIDTH + 8) * 2 + 4 * WIDTH + 8


def takes(num_rows: int, spec: AttentionSpec, rows: torch.Tensor, unfinished: Unfinished, sinks: torch.Tensor | None) -> bool:
    """Whether the kernel attends in a layer, and is the faster.

    Args:
        num_rows: of the step.
        rows: the layer's cache, ``[pages, tokens, kv_heads, N]``.
    """
    qkv, _, cos_sin, rotary_dim, q_weight, k_weight, _, offset, streamed = unfinished
    _, tokens, _, width = rows.shape
    sizes = (spec.head_dim, spec.v_head_dim, tokens, width) == (WIDTH, WIDTH, PAGE, 2 * WIDTH) and spec.group_size <= MAX_GROUP
    plain = spec.window is None and spec.soft_cap is None and sinks is None and not offset
    heads = (q_weight is None) == (k_weight is None) and rotary_dim == (0 if cos_sin is None else WIDTH)
    strides = all(not stride % 8 for stride in (*rows.stride()[:3], qkv.stride(0)))
    whole = strides and rows.stride(3) == 1 and not rows.data_ptr() % 16 and not qkv.data_ptr() % 16
    kinds = qkv.dtype == rows.dtype and rows.dtype in _KINDS
    return (streamed or num_rows >= MIN_ROWS) and sizes and plain and heads and whole and kinds and not refusals(rows.device)


@functools.cache
def choose_tiling(programs: int, multiprocessors: int) -> DecodeTiling:
    """Chooses the tiling for so many rows times KV heads, as measured on an H200 (see benchmarks/)."""
    if programs > multiprocessors:
        return DecodeTiling(4, 3, 1)
    if 2 * programs > multiprocessors:
        return DecodeTiling(4, 3, 2)
    if 16 * programs <= multiprocessors:
        return DecodeTiling(8, 3, 8, 3, gathers=True)
    split = 2 if 4 * programs > multiprocessors else 4
    return DecodeTiling(8, 3, split, split // 2)


def decode_attention(
    unfinished: Unfinished,
    rows: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    tiling: DecodeTiling,
    early: bool,
) -> None:
    """Attends, for one token of each of R rows, and writes the tokens' k and v to the cache.

    Args:
        unfinished: ``qkv [R, ...]`` and what finishes it.
        rows: ``[pages, PAGE, kv_heads, 2 * WIDTH]``: keys, then values of each head; last axis contiguous.
        block_tables: ``[R, B]`` int32.
        seq_lens: ``[R]`` int32 with the new tokens; a row of length 0 comes out as 0.
        out: ``[R, num_heads, WIDTH]`` contiguous; filled.
        early: pages may be read before the kernel before is complete: no kernel since the last launch of this one has written
            pages of this cache, lengths or block tables.
    """
    qkv, slots, cos_sin, _, q_weight, k_weight, eps, *_ = unfinished
    num_rows, num_heads, _ = out.shape
    kv_heads = rows.shape[2]
    kernel = _kernel(tiling, num_heads // kv_heads, out.dtype, q_weight is not None, cos_sin is not None)
    weights = (0 if weight is None else weight.data_ptr() for weight in (q_weight, k_weight))
    angles = (0, 0) if cos_sin is None else (cos_sin.data_ptr(), cos_sin.stride(0))
    meeting = (0, 0)
    if tiling.gathers:
        if num_rows * kv_heads > len(turns := support.counters("decode", out.device)):
            raise ValueError(f"{num_rows} rows of {kv_heads} KV heads do not gather: at most {len(turns)} do")
        numbers = num_rows * kv_heads * tiling.split * (num_heads // kv_heads * WIDTH + 16)
        parts = torch.empty(numbers, dtype=torch.float32, device=out.device)
        meeting = parts.data_ptr(), turns.data_ptr()
    # Pages, heads, lines of keys and values, tokens, and the channels of a line.
    lines = rows.view(*rows.shape[:3], _LINES, WIDTH // 2).permute(0, 2, 3, 1, 4)
    kernel.launch(
        (tiling.split * kv_heads, num_rows, 1), tensor_map(lines, _LINES, PAGE, WIDTH // 2, promotion=128),
        qkv.data_ptr(), out.data_ptr(), rows.data_ptr(), block_tables.data_ptr(), seq_lens.data_ptr(), slots.data_ptr(),
        angles[0], *weights, eps, scale * math.log2(math.e), block_tables.stride(0), qkv.stride(0), angles[1], kv_heads,
        *rows.stride()[:3], int(early), *meeting,
    )  # fmt: skip


@functools.cache
def _kernel(tiling: DecodeTiling, group: int, kind: torch.dtype, norms: bool, rotates: bool) -> CudaKernel:
    macros = {"KIND": _KINDS[kind], "GROUP": group, "WARPS": tiling.warps, "STAGES": tiling.stages, "SPLIT": tiling.split}
    macros |= {"GATHERS": int(tiling.gathers), "LEAST": tiling.least, "NORMS": int(norms), "ROTATES": int(rotates)}
    return CudaKernel(
        _SOURCE,
        "decode_attention",
        "MPPPPPPPPPffiiiiqqqiPP",
        macros,
        32 * tiling.warps,
        tiling.shared(group),
        1 if tiling.gathers else tiling.split,
    )
