"""XAttention's estimate in one pass over the keys. Reference: ``headrace.kernels.sparse.estimate``.

A work item is a tile of query groups of one head. Scores against groups of keys are a matrix product over ``stride * d``
channels. For every query group and block of keys the logarithm of the block's mass goes to memory of the program's own; when
the softmax's denominator is known, these are read again and added up by blocks. There are as many programs as run at a time;
they take items from a counter, the longest first.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from headrace.kernels.attention.triton_tile import find_row
from headrace.kernels.kv_cache.triton import scale_strides
from headrace.kernels.kv_cache.triton_fp8 import OFF, as_bytes, gain, mode, to_half
from headrace.kernels.sparse.reference import PagedKV, PromptRows, num_query_blocks
from headrace.kernels.support import power_of_two, resources
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import begin, options


@dataclasses.dataclass(frozen=True)
class EstimateTiling:
    """Groups of queries and of keys of a tile, programs for each multiprocessor, and what a launch takes."""

    rows: int = 64
    columns: int = 128
    side_by_side: int = 2
    num_warps: int = 4
    num_stages: int = 3


_WIDE = EstimateTiling(rows=16, columns=64, num_stages=2)
"""Tiling for float32: its products go without matrix units and have all operands in registers."""
_VARYING = ["num_rows", "num_items", "width", "scratch_width", "table_row"]
_UNALIGNED = ["tables", "query_start", "seq_lens", "types"]


@triton.jit
def _locate(table, key, BLOCK_SIZE: tl.constexpr):
    """Blocks and places in them of keys that the row has."""
    return tl.load(table + key // BLOCK_SIZE).to(tl.int64), key % BLOCK_SIZE


@triton.jit
def _scores(
    q, keys, k_scale, table, first, num_queries, length, column, q_token, k_block, k_offset, scale_block, scale_offset,
    BLOCK_SIZE: tl.constexpr, STRIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr,
    PIECE: tl.constexpr, FP8: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Sums of ``q . k`` along anti-diagonals, of groups of queries from ``first`` on and the groups ``column`` of keys.

    Groups begin at multiples of ``STRIDE``: where blocks of the cache hold whole groups, a group has one block.
    """
    whole: tl.constexpr = BLOCK_SIZE % STRIDE == 0
    pieces: tl.constexpr = (D + PIECE - 1) // PIECE
    last = length - 1
    block, offset = _locate(table, tl.minimum(column * STRIDE, last), BLOCK_SIZE)
    row_query = first + tl.arange(0, ROWS) * STRIDE + STRIDE - 1
    scores = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(STRIDE * pieces):
        t = step // pieces
        channel = step % pieces * PIECE + tl.arange(0, PIECE)
        query = row_query - t
        present = query < num_queries
        key = column * STRIDE + t
        there = key < length
        if not whole:
            block, offset = _locate(table, tl.minimum(key, last), BLOCK_SIZE)
            offset = offset - t
        q_mask = present[:, None]
        k_mask = there[None, :]
        if D % PIECE != 0:
            q_mask = q_mask & (channel < D)[None, :]
            k_mask = k_mask & (channel < D)[:, None]
        left = tl.load(q + (query.to(tl.int64) * q_token)[:, None] + channel[None, :], mask=q_mask, other=0.0)
        base = keys + block * k_block + (offset + t) * k_offset
        right = tl.load(base[None, :] + channel[:, None], mask=k_mask, other=0)
        if FP8 > 0:
            place = block * scale_block + (offset + t) * scale_offset
            factor = tl.load(k_scale + place, mask=there, other=0.0) * gain(FP8)
            right = to_half(right, FP8).to(tl.float32) * factor[None, :]
        scores = tl.dot(left, right.to(left.dtype), scores, input_precision=PRECISION)
    return scores


@launched(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def _estimate(
    q,  # [T, H, D]
    keys,  # [blocks, block_size, KV, D]
    k_scale,  # [blocks, block_size, KV] float32, FP8 only
    tables,  # [R, B] int32
    query_start,  # [R + 1] int32
    seq_lens,  # [R] int32
    types,  # [R, H] int8
    sums,  # [N, H, width] float32
    scratch,  # [programs, ROWS, scratch_width] float32
    counter,  # int32: items taken
    num_rows,
    num_items,
    width,
    scratch_width,
    scale,  # in base 2
    q_token: tl.int64,
    q_head: tl.int64,
    k_block,
    k_offset,
    k_head,
    scale_block,
    scale_offset,
    scale_head,
    table_row: tl.int64,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    STRIDE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OUTPUTS: tl.constexpr,  # key blocks at a time, when they are read again
    D: tl.constexpr,
    PIECE: tl.constexpr,
    FP8: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    groups: tl.constexpr = BLOCK // STRIDE
    row_blocks: tl.constexpr = ROWS // groups
    column_blocks: tl.constexpr = COLUMNS // groups
    a = tl.arange(0, ROWS)
    own = scratch + tl.program_id(0).to(tl.int64) * ROWS * scratch_width + (a * scratch_width)[:, None]
    item = tl.atomic_add(counter, 1)
    while item < num_items:
        # The last tiles of rows see the most keys.
        tile = (num_items - 1 - item) // HEADS
        head = item % HEADS
        row, row_tile = find_row(query_start, tile, num_rows, 0, ROWS * STRIDE)
        row_start = tl.load(query_start + row)
        num_queries = tl.load(query_start + row + 1) - row_start
        first = (tile - row_tile) * ROWS * STRIDE
        if (first >= 0) & (first < num_queries) & (tl.load(types + row * HEADS + head) == 1):
            length = tl.load(seq_lens + row)
            first_group = (length - num_queries + first) // STRIDE
            valid = first + a * STRIDE < num_queries
            # Behind the last query group's own there is nothing to see.
            end = tl.minimum(first_group + ROWS, (length + STRIDE - 1) // STRIDE)
            q_base = q + row_start.to(tl.int64) * q_token + head * q_head
            kv_head = head // GROUP
            table = tables + row.to(tl.int64) * table_row
            highest = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            for start in range(0, end, COLUMNS):
                column = start + tl.arange(0, COLUMNS)
                scores = _scores(
                    q_base, keys + kv_head * k_head, k_scale + kv_head * scale_head, table, first, num_queries, length, column,
                    q_token, k_block, k_offset, scale_block, scale_offset, BLOCK_SIZE, STRIDE, ROWS, COLUMNS, D, PIECE, FP8,
                    PRECISION,
                )  # fmt: skip
                seen = (column[None, :] <= (first_group + a)[:, None]) & valid[:, None]
                scores = tl.reshape(tl.where(seen, scores * scale, float("-inf")), [ROWS, column_blocks, groups])
                peak = tl.max(scores, 2)
                pivot = tl.where(peak == float("-inf"), 0.0, peak)
                mass = tl.sum(tl.exp2(scores - pivot[:, :, None]), 2)
                place = start // groups + tl.arange(0, column_blocks)
                tl.store(own + place[None, :], tl.where(mass > 0.0, pivot + tl.log2(mass), float("-inf")))
                new_highest = tl.maximum(highest, tl.max(peak, 1))
                pivot_of_all = tl.where(new_highest == float("-inf"), 0.0, new_highest)
                total = total * tl.exp2(highest - pivot_of_all) + tl.sum(mass * tl.exp2(peak - pivot_of_all[:, None]), 1)
                highest = new_highest
            # What one thread wrote, another one reads.
            tl.debug_barrier()
            mass_of_all = tl.where(total > 0.0, highest + tl.log2(total), 0.0)
            out_block = tl.arange(0, row_blocks)
            out_place = row_start // BLOCK + row + first // BLOCK + out_block
            target = sums + (out_place.to(tl.int64) * HEADS + head)[:, None] * width
            written = first + out_block * BLOCK < num_queries
            blocks = (end + groups - 1) // groups
            for start in range(0, blocks, OUTPUTS):
                place = start + tl.arange(0, OUTPUTS)
                logs = tl.load(own + place[None, :], mask=(place < blocks)[None, :], other=float("-inf"))
                shares = tl.reshape(tl.exp2(logs - mass_of_all[:, None]), [row_blocks, groups, OUTPUTS])
                tl.store(target + place[None, :], tl.sum(shares, 1), mask=written[:, None] & (place < blocks)[None, :])
            tl.debug_barrier()
        item = tl.atomic_add(counter, 1)


def estimate(
    q: torch.Tensor,
    kv: PagedKV,
    rows: PromptRows,
    *,
    scale: float,
    stride: int = 16,
    norm: float = 1.0,
    tiling: EstimateTiling | None = None,
) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.sparse.estimate``, in float32 inside; it does not wait for the device.

    Args:
        q: ``[T, num_heads, d]``, last axis contiguous.
        kv: last axes contiguous, but for those of values.
        rows: contiguous.
        tiling: None: as measured best. Bits of the result depend on it.
    """
    num_heads, head_dim = q.shape[1:]
    keys, _, block_tables, k_scale, _ = kv
    query_start, seq_lens, types, _, block = rows
    block_size, kv_heads = keys.shape[1:3]
    num_rows, width, groups = len(seq_lens), rows.width, block // stride
    if block % stride or block & (block - 1) or stride < 1:
        raise ValueError(f"stride {stride} must be a power of two that divides the block, {block}")
    sums = torch.zeros(num_query_blocks(len(q), num_rows, block), num_heads, width, dtype=torch.float32, device=q.device)
    if not num_rows or not len(q):
        return sums
    tiling = tiling or (_WIDE if q.itemsize > 2 else EstimateTiling())
    tall, wide = max(tiling.rows, groups), max(tiling.columns, groups)
    fp8 = OFF
    if k_scale is not None:
        fp8, keys = mode(q.device), as_bytes(keys)
    items = (len(q) // (tall * stride) + num_rows) * num_heads
    programs = min(items, tiling.side_by_side * resources(q.device).multiprocessors)
    scratch_width = -(-width * groups // wide) * wide // groups
    scratch = torch.empty(programs * tall * scratch_width, dtype=torch.float32, device=q.device)
    _estimate[(programs,)](
        q, keys, q if k_scale is None else k_scale, block_tables, query_start, seq_lens, types, sums, scratch,
        torch.zeros(1, dtype=torch.int32, device=q.device), num_rows, items, width, scratch_width,
        scale / (stride * norm) * 1.4426950408889634, *q.stride()[:2], *keys.stride()[:3], *scale_strides(k_scale),
        block_tables.stride(0), BLOCK_SIZE=block_size, HEADS=num_heads, GROUP=num_heads // kv_heads, BLOCK=block, STRIDE=stride,
        ROWS=tall, COLUMNS=wide, OUTPUTS=min(64, power_of_two(width)), D=head_dim, PIECE=_piece(q),
        FP8=fp8, PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=tiling.num_warps,
        num_stages=tiling.num_stages, **options(q.device),
    )  # fmt: skip
    return sums


def _piece(q: torch.Tensor) -> int:
    """Channels at a time: the most that divide a head, else what wastes little."""
    return next((piece for piece in (64, 32) if q.shape[2] % piece == 0 and q.itemsize <= 2), 16)
