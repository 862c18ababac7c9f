"""General paged attention: any group size, K and V of any width, windows, sinks, soft caps, FP8, prefill and decode.

A program takes a tile of queries of one row, with the query heads that share a KV head side by side in it, and walks over
the keys of its split with a running softmax (Milakov and Gimelshein, 2018; Dao et al., 2022). Splits of one row are merged
by a second kernel.

A tile has queries along one axis and keys along the other. Matrix units take at least 16 of the first and 8 of the second
axis: so keys come first (``KEYS_FIRST``) where a tile has up to 8 queries, and queries where it has more.

A head is cut into the largest power of two in its width and the rest (192 = 128 + 64), so that odd widths waste little.
Reference: ``headrace.kernels.attention.reference``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.attention.tiling import KEYS_FIRST, Tiling, cut
from headrace.kernels.attention.triton_finish import finished, load_heads, load_new, load_weights, write_new
from headrace.kernels.attention.triton_splits import merge, partials
from headrace.kernels.attention.triton_tile import (
    find_row,
    finish,
    first_seen,
    load_queries,
    spread,
    store_output,
    take_tile,
    zeros,
)
from headrace.kernels.attention.unfinished import Unfinished
from headrace.kernels.kv_cache.triton import scale_strides
from headrace.kernels.kv_cache.triton_fp8 import OFF, as_bytes, mode
from headrace.kernels.support import cdiv, power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import announce, options, wait

_VARYING = ["num_rows", "first_token", "window", "split_tokens", "table_row"]
"""Numbers that change from step to step or layer to layer: a compiled kernel must not depend on them."""
_UNALIGNED = ["tables", "query_start", "seq_lens", "ends", "slots"]
"""Their views may begin anywhere, and a compiled kernel must not depend on where."""


@triton.jit
def _walk(
    begin, end, low, high, highest, total, acc_a, acc_b, q_a, q_b, peak, position, last_seen, factor, soft_cap, window,
    keys, values, k_scales, v_scales, table, k_block, k_offset, v_block, v_offset, scale_block, scale_offset,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, D_A: tl.constexpr,
    D_B: tl.constexpr, DV: tl.constexpr, DV_A: tl.constexpr, DV_B: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, FP8: tl.constexpr, V_LANE: tl.constexpr, KEYS_FIRST: tl.constexpr,
    PRECISION: tl.constexpr, DIRTY: tl.constexpr, SINGLE: tl.constexpr, MASKED: tl.constexpr, ORDERED: tl.constexpr
):  # fmt: skip
    """Takes in the keys ``[begin, end)``, tile after tile, from a multiple of ``BLOCK_N``."""
    for start in range(begin, end, BLOCK_N):
        highest, total, acc_a, acc_b = take_tile(
            start, low, high, highest, total, acc_a, acc_b, q_a, q_b, peak, position, last_seen, factor, soft_cap, window,
            keys, values, k_scales, v_scales, table, k_block, k_offset, v_block, v_offset, scale_block, scale_offset,
            BLOCK_SIZE, BLOCK_M, BLOCK_N, D, D_A, D_B, DV, DV_A, DV_B, WINDOW, SOFT_CAP, FP8, V_LANE, KEYS_FIRST,
            PRECISION, DIRTY, SINGLE, MASKED, ORDERED,
        )  # fmt: skip
    return highest, total, acc_a, acc_b


@triton.jit
def _walk_phases(
    begin, middle, end, low, high, highest, total, acc_a, acc_b, q_a, q_b, peak, position, last_seen, factor, soft_cap, window,
    keys, values, k_scales, v_scales, table, k_block, k_offset, v_block, v_offset, scale_block, scale_offset,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, D_A: tl.constexpr,
    D_B: tl.constexpr, DV: tl.constexpr, DV_A: tl.constexpr, DV_B: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, FP8: tl.constexpr, V_LANE: tl.constexpr, KEYS_FIRST: tl.constexpr,
    PRECISION: tl.constexpr, DIRTY: tl.constexpr, SINGLE: tl.constexpr, PHASED: tl.constexpr, ORDERED: tl.constexpr
):  # fmt: skip
    """``_walk`` of ``[begin, end)``. With PHASED, tiles before ``middle`` need no masks: all queries see them in full."""
    if PHASED:
        highest, total, acc_a, acc_b = _walk(
            begin, middle, low, high, highest, total, acc_a, acc_b, q_a, q_b, peak, position, last_seen, factor, soft_cap,
            window, keys, values, k_scales, v_scales, table, k_block, k_offset, v_block, v_offset, scale_block, scale_offset,
            BLOCK_SIZE, BLOCK_M, BLOCK_N, D, D_A, D_B, DV, DV_A, DV_B, WINDOW, SOFT_CAP, FP8, V_LANE, KEYS_FIRST,
            PRECISION, DIRTY, SINGLE, False, ORDERED,
        )  # fmt: skip
    return _walk(
        middle, end, low, high, highest, total, acc_a, acc_b, q_a, q_b, peak, position, last_seen, factor, soft_cap,
        window, keys, values, k_scales, v_scales, table, k_block, k_offset, v_block, v_offset, scale_block, scale_offset,
        BLOCK_SIZE, BLOCK_M, BLOCK_N, D, D_A, D_B, DV, DV_A, DV_B, WINDOW, SOFT_CAP, FP8, V_LANE, KEYS_FIRST,
        PRECISION, DIRTY, SINGLE, True, ORDERED,
    )  # fmt: skip


@triton.jit
def _store(
    target, acc_a, acc_b, inverse, valid, DV: tl.constexpr, DV_A: tl.constexpr, DV_B: tl.constexpr, KEYS_FIRST: tl.constexpr
):  # fmt: skip
    store_output(target, acc_a, inverse, valid, 0, DV, DV_A, KEYS_FIRST)
    if DV_B > 0:
        store_output(target, acc_b, inverse, valid, DV_A, DV, DV_B, KEYS_FIRST)


@triton.jit
def _key_range(
    split, first, high, context, window, split_tokens, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr
):  # fmt: skip
    """``[low, high)``: of the keys before ``high``, those that queries from ``first`` on see and that belong to the split."""
    low = 0
    if WINDOW:
        low = first_seen(context + first, window, WINDOW)
    if SPLIT:
        if split_tokens > 0:
            low = tl.maximum(low, split * split_tokens)
            high = tl.minimum(high, (split + 1) * split_tokens)
        else:
            splits = tl.num_programs(2)
            begin = low // BLOCK_N * BLOCK_N
            length = tl.cdiv(tl.cdiv(high - begin, splits), BLOCK_N) * BLOCK_N
            low = tl.maximum(low, begin + split * length)
            high = tl.minimum(high, begin + (split + 1) * length)
    return low, high


@triton.jit
def _row_of(query_start, num_rows, first_token, BLOCK_Q: tl.constexpr, SINGLE: tl.constexpr):
    """A program's row, the row's first token and its queries, and which of these is the program's first."""
    if SINGLE:
        return tl.program_id(0), first_token + tl.program_id(0), 1, 0
    # The last queries of a row see the most keys: they go first, so that no long program is left over at the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row, row_tile = find_row(query_start, tile, num_rows, first_token, BLOCK_Q)
    start = tl.load(query_start + row)
    return row, start, tl.load(query_start + row + 1) - start, (tile - row_tile) * BLOCK_Q


@launched(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def _attend(
    q,  # [T, H, D]
    keys,  # [blocks, block_size, KV, D]
    values,  # [blocks, block_size, KV, DV]
    k_scale,  # [blocks, block_size, KV] float32, FP8 only
    v_scale,  # of k_scale's strides
    tables,  # [R, B] int32
    query_start,  # [R + 1] int32
    seq_lens,  # [R] int32
    sinks,  # [H] float32
    ends,  # [T] int32, HAS_ENDS only
    slots,  # [T], FINISH only, as all that follow up to eps
    cos_sin,  # [T, 2 * HALF] float32
    q_weight,  # [D]
    k_weight,  # [D]
    eps,
    out,  # [T, H, DV]; with SPLIT [tokens of the rows, H, splits, DV] float32
    lse,  # [tokens of the rows, H, splits] float32, base 2
    num_rows,
    first_token,  # the rows' tokens are first_token and following
    scale,
    soft_cap,
    window,
    split_tokens,
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
    angle_token: tl.int64,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,  # query heads in all
    GROUP: tl.constexpr,  # of a KV head
    SHARE: tl.constexpr,  # of a program
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    D_A: tl.constexpr,
    D_B: tl.constexpr,
    DV: tl.constexpr,
    DV_A: tl.constexpr,
    DV_B: tl.constexpr,
    WINDOW: tl.constexpr,  # 1: it slides; 2: it begins at multiples of its length
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    HAS_ENDS: tl.constexpr,  # a query sees the keys before its entry in ends, not those up to its own
    FP8: tl.constexpr,
    V_LANE: tl.constexpr,  # from one channel of a value to the next; where it is not 1, from token to token it is
    SINGLE: tl.constexpr,  # one query a row: row r's is token first_token + r
    PHASED: tl.constexpr,  # whole tiles go without masks
    DIRTY: tl.constexpr,  # what is no key may be NaN, in FP8 too
    SPLIT: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    ORDERED: tl.constexpr,  # weights are summed as values are, in an order that every kernel can keep to
    FINISH: tl.constexpr,  # SINGLE only: of a token, k and v lie behind q, which is not normed and rotated yet, as k is not
    HALF: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    announce(PDL)
    if FINISH:
        q_factors = load_weights(q_weight, D, D_A, HALF, BLOCK_M, Q_NORM, KEYS_FIRST)
        k_factors = load_weights(k_weight, D, D_A, HALF, 1, K_NORM, True)
    wait(PDL)
    shares: tl.constexpr = (GROUP + SHARE - 1) // SHARE
    kv_head = (tl.program_id(1) // shares).to(tl.int64)
    split = tl.program_id(2)
    row, row_start, num_queries, first = _row_of(query_start, num_rows, first_token, BLOCK_Q, SINGLE)
    if first < num_queries:
        context = tl.load(seq_lens + row) - num_queries
        # Number m of the tile is query (first + m // SHARE), and of this program's heads number (m % SHARE).
        m = tl.arange(0, BLOCK_M)
        query = first + m // SHARE
        in_group = tl.program_id(1) % shares * SHARE + m % SHARE
        head = kv_head * GROUP + in_group
        valid = (m < BLOCK_Q * SHARE) & (query < num_queries) & (in_group < GROUP)
        position = context + query
        token = (row_start + query).to(tl.int64)
        if HAS_ENDS:
            # Every query sees itself at least, and what its row has in the cache at most.
            last_seen = tl.maximum(tl.load(ends + token, mask=valid, other=0) - 1, position)
            last_seen = tl.minimum(last_seen, context + num_queries - 1)
            high = tl.max(tl.where(valid, last_seen, 0), 0) + 1
        else:
            last_seen = position
            high = context + tl.minimum(first + BLOCK_Q, num_queries)
        low, high = _key_range(split, first, high, context, window, split_tokens, BLOCK_N, WINDOW, SPLIT)

        q_base = q + token * q_token + head * q_head
        if FINISH:
            angles, behind = cos_sin + row_start * angle_token, q + row_start * q_token + HEADS * D
            heads = load_heads(q_base, valid, angles, D, D_A, HALF, BLOCK_M, KEYS_FIRST)
            new = load_new(slots + row_start, behind, kv_head, angles, HEADS // GROUP, D, D_A, DV, DV_A, HALF)
            q_a = finished(heads, q_factors, eps, D, D_A, HALF, Q_NORM, OFFSET, KEYS_FIRST)
            q_b, peak = q_a, tl.full([BLOCK_M], 1.0, tl.float32)
        else:
            q_a, q_b, peak = load_queries(q_base, valid, BLOCK_M, D, D_A, D_B, FP8, KEYS_FIRST)
        # Scores are in base 2; where a soft cap comes first, after it.
        factor = scale if SOFT_CAP else scale * 1.4426950408889634
        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = spread(BLOCK_M, BLOCK_N, KEYS_FIRST, ORDERED)
        acc_a = zeros(BLOCK_M, DV_A, KEYS_FIRST)
        acc_b = zeros(BLOCK_M, DV_B, KEYS_FIRST) if DV_B > 0 else highest  # any tensor where there is no part b
        keys += kv_head * k_head
        values += kv_head * v_head
        k_scale += kv_head * scale_head
        v_scale += kv_head * scale_head
        if FINISH:
            # Of a row's splits, one reads its last key.
            write_new(
                new, k_factors, eps, (context >= low) & (context < high), keys, values, k_block, k_offset, v_block, v_offset,
                BLOCK_SIZE, D, D_A, DV, DV_A, HALF, K_NORM, OFFSET,
            )  # fmt: skip
        table, begin = tables + row.to(tl.int64) * table_row, low // BLOCK_N * BLOCK_N
        middle = begin
        if PHASED:  # Without a window, low is a tile's first key.
            middle = tl.maximum(tl.minimum(high, context + first + 1) // BLOCK_N * BLOCK_N, begin)
        highest, total, acc_a, acc_b = _walk_phases(
            begin, middle, high, low, high, highest, total, acc_a, acc_b, q_a, q_b, peak, position, last_seen, factor, soft_cap,
            window, keys, values, k_scale, v_scale, table, k_block, k_offset, v_block, v_offset, scale_block,
            scale_offset, BLOCK_SIZE, BLOCK_M, BLOCK_N, D, D_A, D_B, DV, DV_A, DV_B, WINDOW, SOFT_CAP, FP8,
            V_LANE, KEYS_FIRST, PRECISION, DIRTY, SINGLE, PHASED, ORDERED,
        )  # fmt: skip
        highest, total, inverse = finish(
            sinks, head, valid, split, position, split_tokens, highest, total, SINKS, SPLIT, FP8, KEYS_FIRST, ORDERED
        )  # fmt: skip
        place = token * HEADS + head
        if SPLIT:
            place = (place - first_token * HEADS) * tl.num_programs(2) + split
            # Without keys there is neither output nor mass, not even a sink's. A block, so that it can mask others.
            any_key = low + 0 * m < high
            tl.store(lse + place, tl.where(any_key, highest + tl.log2(total), float("-inf")), mask=valid)
            valid = valid & any_key
        _store(out + place * DV, acc_a, acc_b, inverse, valid, DV, DV_A, DV_B, KEYS_FIRST)


def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    tiling: Tiling,
    tokens: range,
    single: bool = False,
    window: int | None = None,
    chunked: bool = False,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    dirty: bool = False,
    visible_ends: torch.Tensor | None = None,
    unfinished: Unfinished | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Kernel version of the reference, in float32 inside; it does not wait for the device.

    Args:
        q: ``[T, num_heads, d]``, last axis contiguous.
        keys: ``[blocks, block_size, kv_heads, d]``, last axis contiguous.
        values: ``[blocks, block_size, kv_heads, dv]``: the last axis is contiguous, or the second.
        block_tables: ``[R, B]`` int32, last axis contiguous.
        seq_lens: a row of length 0 comes out as 0.
        tiling: how to cut up the launch.
        tokens: of q, those that the R rows hold. A batch may be done in parts, each with some of its rows.
        single: every row has one query, and row r's is ``tokens[r]``; ``query_start`` is not read.
        k_scale, v_scale: ``[blocks, block_size, kv_heads]`` float32 of the same strides.
        dirty: where blocks hold no key of their row, FP8 values may be NaN. (All other kinds may in any case.)
        visible_ends: ``[T]`` int32, contiguous; not read where rows are ``single``.
        unfinished: q is a part of its ``qkv``; q is normed and rotated here, and k and v of the rows' tokens are written to
            the cache. Rows are ``single``; see ``finishes``.
        out: ``[T, num_heads, dv]`` contiguous. Tokens of no row keep their values.
        workspace: float32, at least ``partial_size`` numbers, which nothing else uses meanwhile.
    """
    num_heads, head_dim = q.shape[1:]
    block_size, kv_heads, v_head_dim = values.shape[1:]
    group = num_heads // kv_heads
    check_tensors(q, keys, values)
    if out is None:
        out = torch.empty(q.shape[0], num_heads, v_head_dim, dtype=q.dtype, device=q.device)
    num_rows = seq_lens.shape[0]
    if not num_rows or not len(tokens):
        return out
    fp8 = OFF
    if k_scale is not None:
        fp8, keys, values = mode(q.device), as_bytes(keys), as_bytes(values)
    # A row's only query is its last token, behind which there is nothing.
    has_ends = visible_ends is not None and not single
    ends = visible_ends if has_ends else seq_lens
    target = lse = out
    if tiling.merges:
        target, lse = partials(tiling, len(tokens), out, workspace)
    d_a, d_b = cut(head_dim)
    dv_a, dv_b = cut(v_head_dim)
    slots, angles, q_weight, k_weight, eps = q, q, q, q, 0.0
    if unfinished is not None:
        slots, eps = unfinished.slot_mapping, unfinished.eps
        angles, q_weight, k_weight = (q if t is None else t for t in (unfinished.cos_sin, *unfinished[4:6]))
    block_q = 1 if single else tiling.block_q
    tiles = num_rows if single else len(tokens) // block_q + num_rows
    block_m = max(KEYS_FIRST if tiling.keys_first else 16, power_of_two(block_q * tiling.heads))
    _attend[(tiles, kv_heads * cdiv(group, tiling.heads), tiling.splits)](
        q, keys, values, q if k_scale is None else k_scale, q if v_scale is None else v_scale,
        block_tables, query_start, seq_lens, q if sinks is None else sinks, ends, slots, angles, q_weight, k_weight,
        eps, target, lse,
        num_rows, tokens.start, scale, soft_cap or 0.0, window or 0, tiling.split_tokens,
        *q.stride()[:2], *keys.stride()[:3], *values.stride()[:3], *scale_strides(k_scale), block_tables.stride(0),
        angles.stride(0), BLOCK_SIZE=block_size, HEADS=num_heads, GROUP=group, SHARE=tiling.heads,
        BLOCK_Q=block_q, BLOCK_M=block_m, BLOCK_N=tiling.block_n,
        D=head_dim, D_A=d_a, D_B=d_b, DV=v_head_dim, DV_A=dv_a, DV_B=dv_b,
        WINDOW=0 if window is None else 1 + chunked, SOFT_CAP=soft_cap is not None, SINKS=sinks is not None, HAS_ENDS=has_ends,
        FP8=fp8, V_LANE=values.stride(3),
        SINGLE=single, PHASED=not (single or tiling.batch_invariant or window is not None),
        DIRTY=dirty and fp8 != OFF, SPLIT=tiling.merges, KEYS_FIRST=tiling.keys_first,
        ORDERED=tiling.batch_invariant and q.itemsize == 2 and fp8 == OFF and not tiling.keys_first,
        FINISH=unfinished is not None, HALF=0 if unfinished is None else unfinished.rotary_dim // 2,
        Q_NORM=unfinished is not None and unfinished.q_weight is not None,
        K_NORM=unfinished is not None and unfinished.k_weight is not None,
        OFFSET=unfinished is not None and unfinished.offset,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, **options(q.device),
    )  # fmt: skip
    if tiling.merges:
        merge(target, lse, out[tokens.start : tokens.stop], tiling)
    return out


def finishes(keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether ``paged_attention`` takes ``unfinished`` rows for these caches of floats."""
    return not cut(keys.shape[3])[1] and not cut(values.shape[3])[1] and values.stride(3) == 1


def check_tensors(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Raises ValueError if the tensors do not fit each other: q may be a foreign model's."""
    fits = keys.shape[:3] == values.shape[:3] and keys.shape[3] == q.shape[2] and q.shape[1] % keys.shape[2] == 0
    if not fits or q.stride(2) != 1 or keys.stride(3) != 1 or 1 not in (values.stride(3), values.stride(1)):
        shapes = ", ".join(f"{list(t.shape)} by {t.stride()}" for t in (q, keys, values))
        raise ValueError(f"q, keys and values do not fit each other: {shapes}")
