"""Prefill attention in which each head attends densely, to blocks of a mask, or to the first and nearest blocks: one launch.

A first kernel lists the key blocks of every block of queries and head, in ascending order. Those with the most blocks are
launched first, so that heads of very different cost fill the device evenly. Reference: ``headrace.kernels.sparse.reference``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.attention.tiling import Geometry, Tiling, aligned, block_tiling, copies_tiling, cut
from headrace.kernels.attention.triton_tile import (
    find_row,
    finish,
    load_part,
    load_queries,
    product,
    spread,
    store_output,
    take_tile,
    zeros,
)
from headrace.kernels.kv_cache.triton import scale_strides
from headrace.kernels.kv_cache.triton_fp8 import OFF, as_bytes, gain, mode
from headrace.kernels.sparse.reference import BlockMeans, KeyCopies, PagedKV, PromptRows, num_query_blocks
from headrace.kernels.sparse.triton_copies import describe, walk_copies
from headrace.kernels.support import power_of_two, resources
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import begin as begin_launch
from headrace.kernels.triton_pdl import options

MAX_BLOCKS = 1 << 15
"""Key blocks of a row: their numbers are int16."""
_VARYING = ["num_rows", "width", "mask_blocks", "sink_blocks", "local_blocks", "table_row"]
"""Numbers that change from step to step: a compiled kernel must not depend on them."""
_UNALIGNED = ["tables", "query_start", "seq_lens", "types"]


@launched(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def _list_blocks(
    mask,  # [N, H, mask_blocks] bool as bytes, HAS_MASK only
    types,  # [R, H] int8
    query_start,  # [R + 1] int32
    seq_lens,  # [R] int32
    lists,  # [N, H, width] int16
    counts,  # [N, H, 2] int32: blocks in the list, and how many at its beginning all queries see in full
    costs,  # [N, H] int32
    num_rows,
    width,
    mask_blocks,
    sink_blocks,
    local_blocks,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_P: tl.constexpr,  # key blocks
    HAS_MASK: tl.constexpr,
    MEANS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_launch(PDL)
    place = tl.program_id(0)
    head = tl.program_id(1)
    spot = place.to(tl.int64) * HEADS + head
    row, row_place = find_row(query_start, place, num_rows, 0, BLOCK)
    num_queries = tl.load(query_start + row + 1) - tl.load(query_start + row)
    first = (place - row_place) * BLOCK
    count = 0
    full = 0
    cost = 0
    kind = tl.load(types + row * HEADS + head)
    if (first >= 0) & (first < num_queries) & (kind != 2):
        context = tl.load(seq_lens + row) - num_queries
        last = (context + tl.minimum(first + BLOCK, num_queries) - 1) // BLOCK
        block = tl.arange(0, BLOCKS_P)
        chosen = block <= last
        if kind == -1:
            nearest = (context + BLOCK - 1) // BLOCK + first // BLOCK
            chosen = chosen & ((block < sink_blocks) | ((block > nearest - local_blocks) & (block <= nearest)))
        if HAS_MASK:
            masked = (block < mask_blocks) & (kind == 1)
            chosen = chosen & (tl.load(mask + spot * mask_blocks + block, mask=masked, other=1) != 0)
        taken = chosen.to(tl.int32)
        count = tl.sum(taken, 0)
        full = tl.sum(tl.where(block < (context + first + 1) // BLOCK, taken, 0), 0)
        cost = count
        if MEANS:
            cost += tl.where(kind == 1, last // BLOCK, 0)
        tl.store(lists + spot * width + tl.cumsum(taken, 0) - 1, block.to(tl.int16), mask=chosen)
    tl.store(counts + spot * 2, count)
    tl.store(counts + spot * 2 + 1, full)
    tl.store(costs + spot, cost)


@triton.jit
def _take_means(
    start, own, kept, highest, total, acc_a, acc_b, q_a, q_b, peak, factor, keys, values, BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, D_A: tl.constexpr, D_B: tl.constexpr,
    DV: tl.constexpr, DV_A: tl.constexpr, DV_B: tl.constexpr, FP8: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Takes in the blocks ``start ... start + BLOCK_N`` before ``own`` that are not kept: each as ``BLOCK`` equal tokens."""
    block = start + tl.arange(0, BLOCK_N)
    inside = block < own
    counted = inside & (tl.load(kept + block, mask=inside, other=1) == 0)
    base = keys + block.to(tl.int64) * D
    k_a = load_part(base, inside, 0, D, D_A, 1, False, True)
    scores = product(q_a, k_a.to(q_a.dtype), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), False, PRECISION)
    if D_B > 0:
        k_b = load_part(base, inside, D_A, D, D_B, 1, False, True)
        scores = product(q_b, k_b.to(q_b.dtype), scores, False, PRECISION)
    scores = scores * (factor * peak)[:, None] + tl.log2(BLOCK * 1.0)
    scores = tl.where(counted[None, :], scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    pivot = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp2(scores - pivot[:, None])
    decay = tl.exp2(highest - pivot)
    total = total * decay + tl.sum(weights, 1)
    weights = weights.to(q_a.dtype)
    base = values + block.to(tl.int64) * DV
    # Sums of values are ``gain`` times too small.
    v_a = load_part(base, inside, 0, DV, DV_A, 1, True, True).to(tl.float32) * (1.0 / gain(FP8))
    acc_a = product(weights, v_a.to(q_a.dtype), acc_a * decay[:, None], False, PRECISION)
    if DV_B > 0:
        v_b = load_part(base, inside, DV_A, DV, DV_B, 1, True, True).to(tl.float32) * (1.0 / gain(FP8))
        acc_b = product(weights, v_b.to(q_a.dtype), acc_b * decay[:, None], False, PRECISION)
    return new_highest, total, acc_a, acc_b


@triton.jit
def _walk_pages(
    entries, full, count, high, highest, total, acc_a, acc_b, q_a, q_b, peak, position, factor, keys, values, k_scale,
    v_scale, table, k_block, k_offset, v_block, v_offset, scale_block, scale_offset, BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, D_A: tl.constexpr,
    D_B: tl.constexpr, DV: tl.constexpr, DV_A: tl.constexpr, DV_B: tl.constexpr, FP8: tl.constexpr, V_LANE: tl.constexpr,
    PRECISION: tl.constexpr
):  # fmt: skip
    """Takes in the blocks that ``entries`` lists, of keys and values in pages. See ``walk_copies``."""
    per_block: tl.constexpr = BLOCK // BLOCK_N
    # The next block's number is loaded a tile ahead; behind the last one there is room for a number that is not used.
    block = tl.load(entries).to(tl.int32)
    for i in range(full * per_block):
        start = block * BLOCK + i % per_block * BLOCK_N
        block = tl.load(entries + (i + 1) // per_block).to(tl.int32)
        highest, total, acc_a, acc_b = take_tile(
            start, 0, high, highest, total, acc_a, acc_b, q_a, q_b, peak, position, position, factor, 0.0, 0,
            keys, values, k_scale, v_scale, table, k_block, k_offset, v_block, v_offset, scale_block, scale_offset,
            BLOCK_SIZE, BLOCK_M, BLOCK_N, D, D_A, D_B, DV, DV_A, DV_B, False, False, FP8, V_LANE, False,
            PRECISION, False, False, False,
        )  # fmt: skip
    for i in range(full * per_block, count * per_block):
        start = block * BLOCK + i % per_block * BLOCK_N
        block = tl.load(entries + (i + 1) // per_block).to(tl.int32)
        highest, total, acc_a, acc_b = take_tile(
            start, 0, high, highest, total, acc_a, acc_b, q_a, q_b, peak, position, position, factor, 0.0, 0,
            keys, values, k_scale, v_scale, table, k_block, k_offset, v_block, v_offset, scale_block, scale_offset,
            BLOCK_SIZE, BLOCK_M, BLOCK_N, D, D_A, D_B, DV, DV_A, DV_B, False, False, FP8, V_LANE, False,
            PRECISION, FP8 > 0, False, True,
        )  # fmt: skip
    return highest, total, acc_a, acc_b


@launched(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def _attend_blocks(
    q,  # [T, H, D]
    keys,  # [blocks, block_size, KV, D]
    values,  # [blocks, block_size, KV, DV]
    k_scale,  # [blocks, block_size, KV] float32, FP8 only
    v_scale,  # of k_scale's strides
    tables,  # [R, B] int32
    query_start,  # [R + 1] int32
    seq_lens,  # [R] int32
    types,  # [R, H] int8
    lists,  # [N, H, width] int16
    counts,  # [N, H, 2] int32
    order,  # [N * H] int64: what to begin with
    mask,  # [N, H, mask_blocks] bool as bytes, MEANS only
    key_means,  # [R, KV, mask_blocks, D]
    value_means,  # [R, KV, mask_blocks, DV]
    out,  # [T, H, DV]
    copy_start,  # [R] int32, COPIES only: first key of each row
    keys_a,  # [keys, KV * (D + DV)] as descriptors, COPIES only
    keys_b,
    values_a,
    values_b,
    num_rows,
    width,
    mask_blocks,
    scale,
    q_token: tl.int64,
    q_head: tl.int64,
    k_block,
    k_offset,
    k_head,
    v_block,
    v_offset,
    v_head,
    scale_block,
    scale_offset,
    scale_head,
    table_row: tl.int64,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    D_A: tl.constexpr,
    D_B: tl.constexpr,
    DV: tl.constexpr,
    DV_A: tl.constexpr,
    DV_B: tl.constexpr,
    FP8: tl.constexpr,
    V_LANE: tl.constexpr,
    MEANS: tl.constexpr,
    COPIES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_launch(PDL)
    tiles: tl.constexpr = BLOCK // BLOCK_M
    spot = tl.load(order + tl.program_id(0) // tiles)
    place = (spot // HEADS).to(tl.int32)
    head = spot % HEADS
    row, row_place = find_row(query_start, place, num_rows, 0, BLOCK)
    row_start = tl.load(query_start + row)
    num_queries = tl.load(query_start + row + 1) - row_start
    first_of_block = (place - row_place) * BLOCK
    first = first_of_block + tl.program_id(0) % tiles * BLOCK_M
    kind = tl.load(types + row * HEADS + head)
    if (first >= 0) & (first < num_queries) & (kind != 2):
        context = tl.load(seq_lens + row) - num_queries
        count = tl.load(counts + spot * 2)
        full = tl.load(counts + spot * 2 + 1)
        query = first + tl.arange(0, BLOCK_M)
        valid = query < num_queries
        position = context + query
        high = context + tl.minimum(first + BLOCK_M, num_queries)
        token = (row_start + query).to(tl.int64)
        q_a, q_b, peak = load_queries(q + token * q_token + head * q_head, valid, BLOCK_M, D, D_A, D_B, FP8, False)
        factor = scale * 1.4426950408889634
        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = spread(BLOCK_M, BLOCK_N, False)
        acc_a = zeros(BLOCK_M, DV_A, False)
        acc_b = zeros(BLOCK_M, DV_B, False) if DV_B > 0 else highest  # any tensor where there is no part b
        kv_head = head // GROUP
        entries = lists + spot * width
        if COPIES:
            first_key = tl.load(copy_start + row)
            column = kv_head.to(tl.int32) * (D + DV)
            highest, total, acc_a, acc_b = walk_copies(
                entries, full, count, first_key, column, high, highest, total, acc_a, acc_b, q_a, q_b, position, factor, keys_a,
                keys_b, values_a, values_b, BLOCK, BLOCK_N, D, D_A, D_B, DV_A, DV_B, PRECISION,
            )  # fmt: skip
        else:
            highest, total, acc_a, acc_b = _walk_pages(
                entries, full, count, high, highest, total, acc_a, acc_b, q_a, q_b, peak, position, factor,
                keys + kv_head * k_head, values + kv_head * v_head, k_scale + kv_head * scale_head,
                v_scale + kv_head * scale_head, tables + row.to(tl.int64) * table_row, k_block, k_offset, v_block, v_offset,
                scale_block, scale_offset, BLOCK_SIZE, BLOCK, BLOCK_M, BLOCK_N, D, D_A, D_B, DV, DV_A, DV_B, FP8, V_LANE,
                PRECISION,
            )  # fmt: skip
        if MEANS:
            own = tl.where(kind == 1, (context + first_of_block) // BLOCK, 0)
            kept = mask + spot * mask_blocks
            side = (row.to(tl.int64) * (HEADS // GROUP) + kv_head) * mask_blocks
            for start in range(0, own, BLOCK_N):
                highest, total, acc_a, acc_b = _take_means(
                    start, own, kept, highest, total, acc_a, acc_b, q_a, q_b, peak, factor, key_means + side * D,
                    value_means + side * DV, BLOCK, BLOCK_M, BLOCK_N, D, D_A, D_B, DV, DV_A, DV_B, FP8, PRECISION,
                )  # fmt: skip
        highest, total, inverse = finish(q, head, valid, 0, position, 0, highest, total, False, False, FP8, False)
        target = out + (token * HEADS + head) * DV
        store_output(target, acc_a, inverse, valid, 0, DV, DV_A, False)
        if DV_B > 0:
            store_output(target, acc_b, inverse, valid, DV_A, DV, DV_B, False)


def sparse_prefill_attention(
    q: torch.Tensor,
    kv: PagedKV,
    rows: PromptRows,
    mask: torch.Tensor | None,
    *,
    scale: float,
    sink_blocks: int,
    local_blocks: int,
    means: BlockMeans | None = None,
    copies: KeyCopies | None = None,
    out: torch.Tensor | None = None,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """Kernel version of the reference, in float32 inside; it does not wait for the device.

    Args:
        q: ``[T, num_heads, d]``, last axis contiguous.
        kv: last axes contiguous, of values that or the second; both scales of the same strides.
        rows: contiguous.
        mask: contiguous.
        means: contiguous, of q's dtype.
        copies: contiguous, of q's dtype, with tokens of a multiple of 16 bytes.
        tiling: how to cut up the launch; None: by the widths.
    """
    num_heads, head_dim = q.shape[1:]
    keys, values, block_tables, k_scale, v_scale = kv
    query_start, seq_lens, types, _, block = rows
    block_size, kv_heads, v_head_dim = values.shape[1:]
    group, num_rows, width = num_heads // kv_heads, len(seq_lens), rows.width
    places = num_query_blocks(len(q), num_rows, block)
    if width > MAX_BLOCKS:
        raise ValueError(f"{width} key blocks are too many: at most {MAX_BLOCKS} can be numbered")
    if out is None:
        out = torch.zeros(len(q), num_heads, v_head_dim, dtype=q.dtype, device=q.device)
    if not num_rows or not len(q):
        return out
    geometry = Geometry(
        kv_heads, group, head_dim, v_head_dim, q.itemsize, keys.itemsize, resources(q.device), aligned(keys, values)
    )
    tiling = tiling or (block_tiling if copies is None else copies_tiling)(geometry, block)
    fp8, described = OFF, (q, q, q, q, q)
    if copies is not None:
        described = (copies.start, *describe(copies.rows, head_dim, v_head_dim, tiling.block_n))
    elif k_scale is not None:
        fp8, keys, values = mode(q.device), as_bytes(keys), as_bytes(values)
    lists = torch.empty(places, num_heads, width + 1, dtype=torch.int16, device=q.device)
    counts = torch.empty(places, num_heads, 2, dtype=torch.int32, device=q.device)
    costs = torch.empty(places * num_heads, dtype=torch.int32, device=q.device)
    kept = types if mask is None else mask.view(torch.uint8)
    _list_blocks[(places, num_heads)](
        kept, types, query_start, seq_lens, lists, counts, costs, num_rows, width + 1, width, sink_blocks, local_blocks,
        HEADS=num_heads, BLOCK=block, BLOCKS_P=power_of_two(width), HAS_MASK=mask is not None,
        MEANS=means is not None, num_warps=1 if width <= 1024 else 4, **options(q.device),
    )  # fmt: skip
    order = torch.argsort(costs, descending=True, stable=True)
    d_a, d_b = cut(head_dim)
    dv_a, dv_b = cut(v_head_dim)
    _attend_blocks[(places * num_heads * (block // tiling.block_q),)](
        q, keys, values, q if k_scale is None else k_scale, q if v_scale is None else v_scale,
        block_tables, query_start, seq_lens, types, lists, counts, order, kept,
        *((q, q) if means is None else means), out, *described, num_rows, width + 1, width, scale,
        *q.stride()[:2], *keys.stride()[:3], *values.stride()[:3], *scale_strides(k_scale), block_tables.stride(0),
        BLOCK_SIZE=block_size, HEADS=num_heads, GROUP=group, BLOCK=block, BLOCK_M=tiling.block_q,
        BLOCK_N=tiling.block_n, D=head_dim, D_A=d_a, D_B=d_b, DV=v_head_dim, DV_A=dv_a, DV_B=dv_b, FP8=fp8,
        V_LANE=values.stride(3), MEANS=means is not None, COPIES=copies is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, maxnreg=tiling.max_registers, **options(q.device),
    )  # fmt: skip
    return out
