"""Means of blocks of keys and values, and the selection of blocks by their mean key. Reference:
``headrace.kernels.sparse``.
"""

from __future__ import annotations

import math

import torch
import triton.language as tl

from headrace.kernels.attention.tiling import Geometry, block_tiling, cut
from headrace.kernels.attention.triton_tile import find_row, load_part, load_queries, product
from headrace.kernels.kv_cache.triton import scale_strides
from headrace.kernels.kv_cache.triton_fp8 import OFF, as_bytes, gain, mode, to_half
from headrace.kernels.sparse.reference import BlockMeans, PagedKV, PromptRows, num_query_blocks
from headrace.kernels.support import power_of_two, resources
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import begin, options

_TOKENS = 32
"""Keys at a time, of a block whose mean is taken."""


@launched(do_not_specialize=["width", "table_row"], do_not_specialize_on_alignment=["tables", "seq_lens"])
def _block_means(
    side,  # [blocks, block_size, KV, D]
    scales,  # [blocks, block_size, KV] float32, FP8 only
    tables,  # [R, B] int32
    seq_lens,  # [R] int32
    means,  # [R, KV, width, D]
    width,
    side_block,
    side_offset,
    side_head,
    scale_block,
    scale_offset,
    scale_head,
    table_row: tl.int64,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    D: tl.constexpr,
    D_P: tl.constexpr,
    LANE: tl.constexpr,
    FP8: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    number = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    length = tl.load(seq_lens + row)
    channel = tl.arange(0, D_P)
    inside = channel < D
    sums = tl.zeros([D_P], tl.float32)
    end = tl.minimum(length, (number + 1) * BLOCK)
    for start in range(number * BLOCK, end, TOKENS):
        token = start + tl.arange(0, TOKENS)
        present = token < end
        block = tl.load(tables + row * table_row + token // BLOCK_SIZE, mask=present, other=0).to(tl.int64)
        offset = token % BLOCK_SIZE
        base = side + kv_head * side_head + block * side_block + offset * side_offset
        mask = present[:, None] & inside[None, :]
        x = tl.load(base[:, None] + (channel * LANE)[None, :], mask=mask, other=0)
        if FP8 > 0:
            place = kv_head * scale_head + block * scale_block + offset * scale_offset
            scale = tl.load(scales + place, mask=present, other=0.0) * gain(FP8)
            sums += tl.sum(to_half(x, FP8).to(tl.float32) * scale[:, None], 0)
        else:
            sums += tl.sum(x.to(tl.float32), 0)
    mean = sums / tl.maximum(end - number * BLOCK, 1).to(tl.float32)
    target = means + ((row * tl.num_programs(1) + kv_head) * width + number) * D
    tl.store(target + channel, mean.to(means.dtype.element_ty), mask=inside)


def block_means(q: torch.Tensor, kv: PagedKV, rows: PromptRows) -> BlockMeans:
    """Kernel version of ``headrace.kernels.sparse.block_means``: sums in float32, rounded to q's dtype."""
    keys, values, block_tables, k_scale, v_scale = kv
    fp8 = OFF if k_scale is None else mode(keys.device)
    num_rows, kv_heads, width, block = len(rows.seq_lens), keys.shape[2], rows.width, rows.block
    means = []
    for side, scale in ((keys, k_scale), (values, v_scale)):
        head_dim = side.shape[3]
        out = torch.empty(num_rows, kv_heads, width, head_dim, dtype=q.dtype, device=keys.device)
        stored = side if scale is None else as_bytes(side)
        _block_means[(width, kv_heads, num_rows)](
            stored, out if scale is None else scale, block_tables, rows.seq_lens, out, width, *stored.stride()[:3],
            *scale_strides(scale), block_tables.stride(0), BLOCK_SIZE=side.shape[1], BLOCK=block, TOKENS=min(_TOKENS, block),
            D=head_dim, D_P=power_of_two(head_dim), LANE=side.stride(3), FP8=fp8, num_warps=4,
            **options(keys.device),
        )  # fmt: skip
        means.append(out)
    return BlockMeans(*means)


@launched(do_not_specialize=["num_rows", "width"], do_not_specialize_on_alignment=["types", "query_start", "seq_lens"])
def _score_means(
    q,  # [T, H, D]
    key_means,  # [R, KV, width, D]
    types,  # [R, H] int8
    query_start,  # [R + 1] int32
    seq_lens,  # [R] int32
    scores,  # [N, H, BLOCK // BLOCK_M, width] float32: logarithms in base 2
    num_rows,
    width,
    scale,
    q_token: tl.int64,
    q_head: tl.int64,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    D_A: tl.constexpr,
    D_B: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scores of blocks before the query block's own, each of a tile of its queries."""
    begin(PDL)
    tiles: tl.constexpr = BLOCK // BLOCK_M
    place = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    row, row_place = find_row(query_start, place, num_rows, 0, BLOCK)
    row_start = tl.load(query_start + row)
    num_queries = tl.load(query_start + row + 1) - row_start
    first = (place - row_place) * BLOCK
    if (first >= 0) & (first < num_queries) & (tl.load(types + row * HEADS + head) == 1):
        own = (tl.load(seq_lens + row) - num_queries + first) // BLOCK
        query = first + part * BLOCK_M + tl.arange(0, BLOCK_M)
        valid = query < num_queries
        q_base = q + (row_start + query).to(tl.int64) * q_token + head * q_head
        q_a, q_b, _ = load_queries(q_base, valid, BLOCK_M, D, D_A, D_B, 0, False)
        keys = key_means + (row.to(tl.int64) * (HEADS // GROUP) + head // GROUP) * width * D
        target = scores + ((place.to(tl.int64) * HEADS + head) * tiles + part) * width
        for start in range(0, own, BLOCK_N):
            block = start + tl.arange(0, BLOCK_N)
            inside = block < own
            base = keys + block * D
            logits = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            logits = product(q_a, load_part(base, inside, 0, D, D_A, 1, False, True), logits, False, PRECISION)
            if D_B > 0:
                logits = product(q_b, load_part(base, inside, D_A, D, D_B, 1, False, True), logits, False, PRECISION)
            logits = tl.where(valid[:, None], logits * scale, float("-inf"))
            highest = tl.max(logits, 0)
            pivot = tl.where(highest == float("-inf"), 0.0, highest)
            score = pivot + tl.log2(tl.sum(tl.exp2(logits - pivot[None, :]), 0))
            tl.store(target + block, score, mask=inside)


@launched(
    do_not_specialize=["num_rows", "width", "sink_blocks", "local_blocks"],
    do_not_specialize_on_alignment=["types", "query_start", "seq_lens"],
)
def _keep_high(
    scores,  # [N, H, TILES, width] float32
    types,  # [R, H] int8
    query_start,  # [R + 1] int32
    seq_lens,  # [R] int32
    mask,  # [N, H, width] bool as bytes
    num_rows,
    width,
    sink_blocks,
    local_blocks,
    margin,  # of scores, below the highest
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_P: tl.constexpr,
    TILES: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    place = tl.program_id(0)
    head = tl.program_id(1)
    spot = place.to(tl.int64) * HEADS + head
    row, row_place = find_row(query_start, place, num_rows, 0, BLOCK)
    num_queries = tl.load(query_start + row + 1) - tl.load(query_start + row)
    first = (place - row_place) * BLOCK
    block = tl.arange(0, BLOCKS_P)
    chosen = block < 0
    if (first >= 0) & (first < num_queries) & (tl.load(types + row * HEADS + head) == 1):
        own = (tl.load(seq_lens + row) - num_queries + first) // BLOCK
        rivals = block < own
        score = tl.load(scores + spot * TILES * width + block, mask=rivals, other=float("-inf"))
        for tile in range(1, TILES):
            other = tl.load(scores + (spot * TILES + tile) * width + block, mask=rivals, other=float("-inf"))
            highest = tl.maximum(score, other)
            pivot = tl.where(highest == float("-inf"), 0.0, highest)
            score = pivot + tl.log2(tl.exp2(score - pivot) + tl.exp2(other - pivot))
        chosen = rivals & (score >= tl.max(score, 0) - margin)
        chosen = chosen | (block < sink_blocks) | (block > own - local_blocks)
        chosen = chosen & (block <= own)
    tl.store(mask + spot * width + block, chosen.to(tl.uint8), mask=block < width)


def select_mean(
    q: torch.Tensor,
    key_means: torch.Tensor,
    rows: PromptRows,
    *,
    scale: float,
    alpha: float = 0.1,
    sink_blocks: int = 2,
    local_blocks: int = 4,
) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.sparse.select_mean``; it does not wait for the device.

    Args:
        q: ``[T, num_heads, d]``, last axis contiguous.
        key_means: ``[R, kv_heads, Kb, d]`` of q's dtype, contiguous.
        rows: contiguous.
    """
    num_heads, head_dim = q.shape[1:]
    num_rows, kv_heads, width = key_means.shape[:3]
    query_start, seq_lens, types, _, block = rows
    places = num_query_blocks(len(q), num_rows, block)
    mask = torch.empty(places, num_heads, width, dtype=torch.bool, device=q.device)
    if not places:
        return mask
    geometry = Geometry(kv_heads, num_heads // kv_heads, head_dim, head_dim, q.itemsize, q.itemsize, resources(q.device))
    tiling = block_tiling(geometry, block)
    tiles = block // tiling.block_q
    scores = torch.empty(places, num_heads, tiles, width, dtype=torch.float32, device=q.device)
    d_a, d_b = cut(head_dim)
    _score_means[(places, num_heads, tiles)](
        q, key_means, types, query_start, seq_lens, scores, num_rows, width, scale * 1.4426950408889634, *q.stride()[:2],
        HEADS=num_heads, GROUP=num_heads // kv_heads, BLOCK=block, BLOCK_M=tiling.block_q, BLOCK_N=tiling.block_n, D=head_dim,
        D_A=d_a, D_B=d_b, PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=tiling.num_warps,
        num_stages=tiling.num_stages, **options(q.device),
    )  # fmt: skip
    blocks = power_of_two(width)
    _keep_high[(places, num_heads)](
        scores, types, query_start, seq_lens, mask.view(torch.uint8), num_rows, width, sink_blocks, local_blocks,
        -math.log2(alpha), HEADS=num_heads, BLOCK=block, BLOCKS_P=blocks, TILES=tiles,
        num_warps=min(8, max(1, blocks // 1024)), **options(q.device),
    )  # fmt: skip
    return mask
