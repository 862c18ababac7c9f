"""General paged attention: any group size, K and V of any width, windows, sinks, soft caps, FP8, prefill and decode.

A program takes a tile of queries of one row, with the query heads that share a KV head side by side in it, and walks over
the keys of its split with a running softmax (Milakov and Gimelshein, 2018; Dao et al., 2022). Splits of one row are merged
by a second kernel.

A tile has queries along one axis and keys along the other. Matrix units take at least 16 of the first and 8 of the second
axis: so keys come first (``KEYS_FIRST``) where a tile has up to 8 queries, and queries where it has more.

A head is cut into the largest power of two in its width and the rest (192 = 128 + 64), so that odd widths waste little.
Reference: ``headrace.kernels.paged_attention``.
"""

# A kernel's arguments have no types of Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.kv_cache import check_same_strides, check_scales
from headrace.kernels.triton.fp8 import OFF, as_bytes, gain, mode, to_half
from headrace.kernels.triton.kv_cache import scale_strides
from headrace.kernels.triton.pdl import begin as begin_launch
from headrace.kernels.triton.pdl import options
from headrace.kernels.triton.splits import merge, partials
from headrace.kernels.triton.tiling import KEYS_FIRST, Tiling, cut

_VARYING = ["num_rows", "first_token", "window", "split_tokens", "table_row"]
"""Numbers that change from step to step or layer to layer: a compiled kernel must not depend on them."""
_UNALIGNED = ["tables", "query_start", "seq_lens", "ends"]
"""Their views may begin anywhere, and a compiled kernel must not depend on where."""


@triton.jit
def _find_row(query_start, tile, num_rows, first_token, BLOCK_Q: tl.constexpr):
    """The row that a tile of queries belongs to, and the row's first tile: ``tokens before it // BLOCK_Q + row``."""
    low = 0
    high = num_rows
    while low < high:
        middle = (low + high) // 2
        if (tl.load(query_start + middle) - first_token) // BLOCK_Q + middle <= tile:
            low = middle + 1
        else:
            high = middle
    row = low - 1
    return row, (tl.load(query_start + row) - first_token) // BLOCK_Q + row


@triton.jit
def _per_query(x, KEYS_FIRST: tl.constexpr):
    """``[queries]``, spread over a tile."""
    if KEYS_FIRST:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def _per_key(x, KEYS_FIRST: tl.constexpr):
    """``[keys]``, spread over a tile."""
    if KEYS_FIRST:
        return x[:, None]
    else:
        return x[None, :]


@triton.jit
def _load_part(
    base, present, FIRST: tl.constexpr, WIDTH: tl.constexpr, WIDTH_P: tl.constexpr, LANE: tl.constexpr,
    BASE_FIRST: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Channels ``FIRST ... FIRST + WIDTH_P`` of the heads that begin at ``base``: ``[base, channel]`` or the other way."""
    channel = FIRST + tl.arange(0, WIDTH_P)
    if BASE_FIRST:
        pointers = base[:, None] + (channel * LANE)[None, :]
        mask = present[:, None] & (channel < WIDTH)[None, :]
        narrow = (channel < WIDTH)[None, :]
    else:
        pointers = base[None, :] + (channel * LANE)[:, None]
        mask = present[None, :] & (channel < WIDTH)[:, None]
        narrow = (channel < WIDTH)[:, None]
    if MASKED:
        return tl.load(pointers, mask=mask, other=0)
    elif FIRST + WIDTH_P > WIDTH:
        return tl.load(pointers, mask=narrow, other=0)
    else:
        return tl.load(pointers)


@triton.jit
def _operand(stored, DTYPE: tl.constexpr, FP8: tl.constexpr):
    """What came from the cache as a factor of a matrix product."""
    if FP8 > 0:
        return to_half(stored, FP8)
    else:
        return stored.to(DTYPE)


@triton.jit
def _product(of_queries, of_keys, acc, KEYS_FIRST: tl.constexpr, PRECISION: tl.constexpr):
    """A tile's matrix product, added to ``acc``; both factors stand as the tile does."""
    if KEYS_FIRST:
        return tl.dot(of_keys, of_queries, acc, input_precision=PRECISION)
    else:
        return tl.dot(of_queries, of_keys, acc, input_precision=PRECISION)


@triton.jit
def _scores(
    q_a, q_b, base, present, factor, soft_cap, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr,
    D_A: tl.constexpr, D_B: tl.constexpr, SOFT_CAP: tl.constexpr, FP8: tl.constexpr, KEYS_FIRST: tl.constexpr,
    PRECISION: tl.constexpr
):  # fmt: skip
    """Scores of the keys at ``base``, in base 2. What is no key gets any number: every address is a valid one."""
    if KEYS_FIRST:
        scores = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    k_a = _load_part(base, present, 0, D, D_A, 1, KEYS_FIRST, False)
    scores = _product(q_a, _operand(k_a, q_a.dtype, FP8), scores, KEYS_FIRST, PRECISION)
    if D_B > 0:
        k_b = _load_part(base, present, D_A, D, D_B, 1, KEYS_FIRST, False)
        scores = _product(q_b, _operand(k_b, q_b.dtype, FP8), scores, KEYS_FIRST, PRECISION)
    scores = scores * factor
    if SOFT_CAP:
        # tanh x is 2 sigmoid(2 x) - 1.
        scores = (soft_cap * 1.4426950408889634) * (2.0 * tl.sigmoid(2.0 * scores / soft_cap) - 1.0)
    return scores


@triton.jit
def _places(table, start, last_block, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Blocks, and places in them, of the keys from ``start`` on, a multiple of ``BLOCK_N``; behind ``last_block`` it again.

    That all tokens of a block have one number lets the compiler load the values of a block's tokens in one piece.
    """
    n = tl.arange(0, BLOCK_N)
    if BLOCK_N % BLOCK_SIZE == 0:
        # Tiles begin with a block: a key's place in its block is the same in all of them.
        column = start // BLOCK_SIZE + tl.arange(0, BLOCK_N // BLOCK_SIZE)
        block = tl.load(table + tl.minimum(column, last_block))
        block = tl.reshape(tl.broadcast_to(block[:, None], [BLOCK_N // BLOCK_SIZE, BLOCK_SIZE]), [BLOCK_N])
        return tl.max_constancy(block, BLOCK_SIZE).to(tl.int64), n % BLOCK_SIZE
    else:
        block = tl.load(table + tl.minimum((start + n) // BLOCK_SIZE, last_block))
        return block.to(tl.int64), (start + n) % BLOCK_SIZE


@triton.jit
def _seen(
    key, present, position, last_seen, window, WINDOW: tl.constexpr, SINGLE: tl.constexpr, KEYS_FIRST: tl.constexpr
):  # fmt: skip
    """Which queries of a tile see which keys; a row's only query sees what is present."""
    seen = _per_key(present, KEYS_FIRST)
    if not SINGLE:
        seen = seen & (_per_key(key, KEYS_FIRST) <= _per_query(last_seen, KEYS_FIRST))
        if WINDOW:
            seen = seen & (_per_key(key, KEYS_FIRST) > _per_query(position - window, KEYS_FIRST))
    return seen


@triton.jit
def _parts(scale):
    """A scale as 2 ** size * rest, with 1 <= rest < 2, and 2 ** -size. NaN is in ``rest``."""
    scale = tl.where(scale < 1e-12, 1e-12, scale)
    # Of NaN too, 2 ** -size is a number.
    exponent = tl.minimum(scale.to(tl.int32, bitcast=True) >> 23, 253)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return (exponent - 127).to(tl.float32), scale * inverse, inverse


@triton.jit
def _walk(
    begin, end, low, high, highest, total, acc_a, acc_b, q_a, q_b, peak, position, last_seen, factor, soft_cap, window,
    keys, values, k_scales, v_scales, table, k_block, k_offset, v_block, v_offset, scale_block, scale_offset,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, D_A: tl.constexpr,
    D_B: tl.constexpr, DV: tl.constexpr, DV_A: tl.constexpr, DV_B: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, FP8: tl.constexpr, V_LANE: tl.constexpr, KEYS_FIRST: tl.constexpr,
    PRECISION: tl.constexpr, DIRTY: tl.constexpr, SINGLE: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Takes in the keys ``[begin, end)``, tile after tile, from a multiple of ``BLOCK_N``; of these only ``[low, high)`` count.

    ``highest`` is the running maximum of scores, ``acc_a``, ``acc_b`` are the sums of values weighed by ``exp2``, and
    ``total`` that of the weights: keys first, each place of the tile has its own, as ``_spread`` makes them, so that threads
    meet once a tile and not twice. Not ``MASKED``: every query sees every key.

    In FP8 the size of a value's scale, a power of two, is part of its score: the weights that multiply e4m3 numbers are then
    below 2, and most of what counts is not far below, which float16 has digits for. ``total`` is free of it.
    """
    axis: tl.constexpr = 0 if KEYS_FIRST else 1
    n = tl.arange(0, BLOCK_N)
    for start in range(begin, end, BLOCK_N):
        key = start + n
        present = key < high
        if WINDOW:
            # Keys before low may be another row's by now: a window gives blocks back. Without one, low is a tile's first key.
            present = present & (key >= low)
        block, offset = _places(table, start, (high - 1) // BLOCK_SIZE, BLOCK_SIZE, BLOCK_N)
        base = keys + block * k_block + offset * k_offset
        if FP8 > 0:
            place = block * scale_block + offset * scale_offset
            k_scale = tl.load(k_scales + place, mask=present, other=0.0) * (factor * gain(FP8))
            tile_factor = _per_key(k_scale, KEYS_FIRST) * _per_query(peak, KEYS_FIRST)
            v_scale = tl.load(v_scales + place, mask=present, other=1.0)
            v_size, v_rest, v_inverse = _parts(v_scale)
        else:
            tile_factor = factor
        scores = _scores(
            q_a, q_b, base, present, tile_factor, soft_cap, BLOCK_M, BLOCK_N, D, D_A, D_B, SOFT_CAP, FP8, KEYS_FIRST, PRECISION
        )  # fmt: skip
        if FP8 > 0:
            scores += _per_key(v_size, KEYS_FIRST)
        if MASKED:
            seen = _seen(key, present, position, last_seen, window, WINDOW, SINGLE, KEYS_FIRST)
            scores = tl.where(seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis))
        pivot = new_highest
        if MASKED:
            # A query without keys so far keeps weight 0 instead of exp2(-inf - -inf).
            pivot = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - _per_query(pivot, KEYS_FIRST))
        decay = tl.exp2(highest - pivot)
        highest = new_highest
        masses = weights
        if FP8 > 0:
            masses = weights * _per_key(v_inverse, KEYS_FIRST)
            weights = weights * _per_key(v_rest, KEYS_FIRST)
            if MASKED:
                # The scale of a key that a query does not see may be NaN.
                weights = tl.where(seen, weights, 0.0)
        if KEYS_FIRST:
            total = total * _per_query(decay, KEYS_FIRST) + masses
        else:
            total = total * decay + tl.sum(masses, axis)
        weights = weights.to(q_a.dtype)
        # e4m3 that is not DIRTY is finite: weight 0 is enough for what is no key. A mask by token would part its loads.
        shielded: tl.constexpr = MASKED and FP8 == 0
        if V_LANE == 1:
            base = values + block * v_block + offset * v_offset
        else:
            base = values + block * v_block + offset
        v_a = _load_part(base, present, 0, DV, DV_A, V_LANE, not KEYS_FIRST, shielded)
        if MASKED and DIRTY:
            v_a = tl.where(_per_key(present, not KEYS_FIRST), v_a, 0)
        acc_a = acc_a * _per_query(decay, KEYS_FIRST)
        acc_a = _product(weights, _operand(v_a, q_a.dtype, FP8), acc_a, KEYS_FIRST, PRECISION)
        if DV_B > 0:
            v_b = _load_part(base, present, DV_A, DV, DV_B, V_LANE, not KEYS_FIRST, shielded)
            if MASKED and DIRTY:
                v_b = tl.where(_per_key(present, not KEYS_FIRST), v_b, 0)
            acc_b = acc_b * _per_query(decay, KEYS_FIRST)
            acc_b = _product(weights, _operand(v_b, q_a.dtype, FP8), acc_b, KEYS_FIRST, PRECISION)
    return highest, total, acc_a, acc_b


@triton.jit
def _key_range(
    split, first, high, context, window, split_tokens, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr
):  # fmt: skip
    """``[low, high)``: of the keys before ``high``, those that queries from ``first`` on see and that belong to the split."""
    low = 0
    if WINDOW:
        low = tl.maximum(0, context + first - window + 1)
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
def _load_queries(
    base, valid, BLOCK_M: tl.constexpr, D: tl.constexpr, D_A: tl.constexpr, D_B: tl.constexpr, FP8: tl.constexpr,
    KEYS_FIRST: tl.constexpr
):  # fmt: skip
    """The tile's queries in two parts, and what they must be multiplied with."""
    channels: tl.constexpr = 0 if KEYS_FIRST else 1
    q_a = _load_part(base, valid, 0, D, D_A, 1, not KEYS_FIRST, True)
    q_b = q_a
    if D_B > 0:
        q_b = _load_part(base, valid, D_A, D, D_B, 1, not KEYS_FIRST, True)
    peak = tl.full([BLOCK_M], 1.0, tl.float32)
    if FP8 > 0:
        # One instruction makes two e4m3 numbers float16, so q becomes float16 too, brought into its range.
        peak = tl.max(tl.abs(q_a.to(tl.float32)), channels)
        if D_B > 0:
            peak = tl.maximum(peak, tl.max(tl.abs(q_b.to(tl.float32)), channels))
        peak = tl.where(peak == 0.0, 1.0, peak)
        q_a = (q_a.to(tl.float32) / _per_query(peak, KEYS_FIRST)).to(tl.float16)
        if D_B > 0:
            q_b = (q_b.to(tl.float32) / _per_query(peak, KEYS_FIRST)).to(tl.float16)
    return q_a, q_b, peak


@triton.jit
def _spread(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """The sum of weights before the first key."""
    if KEYS_FIRST:
        return tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        return tl.zeros([BLOCK_M], tl.float32)


@triton.jit
def _finish(
    sinks, head, valid, split, position, split_tokens, highest, total, SINKS: tl.constexpr, SPLIT: tl.constexpr,
    FP8: tl.constexpr, KEYS_FIRST: tl.constexpr
):  # fmt: skip
    """The maximum and the sum of weights, sinks included, and what the sums of values must be multiplied with."""
    if KEYS_FIRST:
        total = tl.sum(total, 0)
    share = gain(FP8)
    if SINKS:
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * 1.4426950408889634
        if SPLIT:
            # Of a query's splits one counts its sink: one that sees a key of the query's.
            owner = tl.where(split_tokens > 0, position // tl.maximum(split_tokens, 1), 0)
            sink = tl.where(owner == split, sink, float("-inf"))
        without = highest
        highest = tl.maximum(highest, sink)
        pivot = tl.where(highest == float("-inf"), 0.0, highest)
        decay = tl.exp2(without - pivot)
        total = total * decay + tl.exp2(sink - pivot)
        share = share * decay
    total = tl.where(total == 0.0, 1.0, total)
    return highest, total, share / total


@triton.jit
def _zeros(BLOCK_M: tl.constexpr, WIDTH_P: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """A sum of values for each query."""
    if KEYS_FIRST:
        return tl.zeros([WIDTH_P, BLOCK_M], tl.float32)
    else:
        return tl.zeros([BLOCK_M, WIDTH_P], tl.float32)


@triton.jit
def _store(
    target, acc, inverse, valid, FIRST: tl.constexpr, WIDTH: tl.constexpr, WIDTH_P: tl.constexpr, KEYS_FIRST: tl.constexpr
):  # fmt: skip
    channel = FIRST + tl.arange(0, WIDTH_P)
    result = acc * _per_query(inverse, KEYS_FIRST)
    mask = _per_query(valid, KEYS_FIRST) & _per_key(channel < WIDTH, KEYS_FIRST)
    pointers = _per_query(target, KEYS_FIRST) + _per_key(channel, KEYS_FIRST)
    tl.store(pointers, result.to(target.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
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
    WINDOW: tl.constexpr,
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
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_launch(PDL)
    shares: tl.constexpr = (GROUP + SHARE - 1) // SHARE
    kv_head = (tl.program_id(1) // shares).to(tl.int64)
    split = tl.program_id(2)
    if SINGLE:
        row = tl.program_id(0)
        row_start = first_token + row
        num_queries = 1
        first = 0
    else:
        # The last queries of a row see the most keys: they go first, so that no long program is left over at the end.
        tile = tl.num_programs(0) - 1 - tl.program_id(0)
        row, row_tile = _find_row(query_start, tile, num_rows, first_token, BLOCK_Q)
        row_start = tl.load(query_start + row)
        num_queries = tl.load(query_start + row + 1) - row_start
        first = (tile - row_tile) * BLOCK_Q
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
        q_a, q_b, peak = _load_queries(q_base, valid, BLOCK_M, D, D_A, D_B, FP8, KEYS_FIRST)
        # Scores are in base 2; where a soft cap comes first, after it.
        factor = scale if SOFT_CAP else scale * 1.4426950408889634
        highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = _spread(BLOCK_M, BLOCK_N, KEYS_FIRST)
        acc_a = _zeros(BLOCK_M, DV_A, KEYS_FIRST)
        acc_b = _zeros(BLOCK_M, DV_B, KEYS_FIRST) if DV_B > 0 else highest  # any tensor where there is no part b
        keys += kv_head * k_head
        values += kv_head * v_head
        k_scale += kv_head * scale_head
        v_scale += kv_head * scale_head
        table, begin = tables + row.to(tl.int64) * table_row, low // BLOCK_N * BLOCK_N
        if PHASED:
            # Tiles that all queries see in full need no masks. Without a window, low is a tile's first key.
            middle = tl.minimum(high, context + first + 1)
            middle = tl.maximum(middle // BLOCK_N * BLOCK_N, begin)
            highest, total, acc_a, acc_b = _walk(
                begin, middle, low, high, highest, total, acc_a, acc_b, q_a, q_b, peak, position, last_seen, factor, soft_cap,
                window, keys, values, k_scale, v_scale, table, k_block, k_offset, v_block, v_offset, scale_block,
                scale_offset, BLOCK_SIZE, BLOCK_M, BLOCK_N, D, D_A, D_B, DV, DV_A, DV_B, WINDOW, SOFT_CAP, FP8,
                V_LANE, KEYS_FIRST, PRECISION, DIRTY, SINGLE, False,
            )  # fmt: skip
            begin = middle
        highest, total, acc_a, acc_b = _walk(
            begin, high, low, high, highest, total, acc_a, acc_b, q_a, q_b, peak, position, last_seen, factor, soft_cap,
            window, keys, values, k_scale, v_scale, table, k_block, k_offset, v_block, v_offset, scale_block,
            scale_offset, BLOCK_SIZE, BLOCK_M, BLOCK_N, D, D_A, D_B, DV, DV_A, DV_B, WINDOW, SOFT_CAP, FP8,
            V_LANE, KEYS_FIRST, PRECISION, DIRTY, SINGLE, True,
        )  # fmt: skip

        highest, total, inverse = _finish(
            sinks, head, valid, split, position, split_tokens, highest, total, SINKS, SPLIT, FP8, KEYS_FIRST
        )  # fmt: skip
        place = token * HEADS + head
        if SPLIT:
            place = (place - first_token * HEADS) * tl.num_programs(2) + split
            # Without keys there is neither output nor mass, not even a sink's. A block, so that it can mask others.
            any_key = low + 0 * m < high
            tl.store(lse + place, tl.where(any_key, highest + tl.log2(total), float("-inf")), mask=valid)
            valid = valid & any_key
        _store(out + place * DV, acc_a, inverse, valid, 0, DV, DV_A, KEYS_FIRST)
        if DV_B > 0:
            _store(out + place * DV, acc_b, inverse, valid, DV_A, DV, DV_B, KEYS_FIRST)


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
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    dirty: bool = False,
    visible_ends: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.paged_attention``, in float32 inside; it does not wait for the device.

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
        out: ``[T, num_heads, dv]`` contiguous. Tokens of no row keep their values.
        workspace: float32, at least ``partial_size`` numbers, which nothing else uses meanwhile.
    """
    num_heads, head_dim = q.shape[1:]
    block_size, kv_heads, v_head_dim = values.shape[1:]
    group = num_heads // kv_heads
    _check(q, keys, values, k_scale, v_scale)
    if out is None:
        out = torch.empty(len(q), num_heads, v_head_dim, dtype=q.dtype, device=q.device)
    num_rows = len(seq_lens)
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
    block_q = 1 if single else tiling.block_q
    tiles = num_rows if single else len(tokens) // block_q + num_rows
    block_m = max(KEYS_FIRST if tiling.keys_first else 16, triton.next_power_of_2(block_q * tiling.heads))
    _attend[(tiles, kv_heads * triton.cdiv(group, tiling.heads), tiling.splits)](
        q, keys, values, q if k_scale is None else k_scale, q if v_scale is None else v_scale,
        block_tables, query_start, seq_lens, q if sinks is None else sinks, ends, target, lse,
        num_rows, tokens.start, scale, soft_cap or 0.0, window or 0, tiling.split_tokens,
        *q.stride()[:2], *keys.stride()[:3], *values.stride()[:3], *scale_strides(k_scale), block_tables.stride(0),
        BLOCK_SIZE=block_size, HEADS=num_heads, GROUP=group, SHARE=tiling.heads,
        BLOCK_Q=block_q, BLOCK_M=block_m, BLOCK_N=tiling.block_n,
        D=head_dim, D_A=d_a, D_B=d_b, DV=v_head_dim, DV_A=dv_a, DV_B=dv_b,
        WINDOW=window is not None, SOFT_CAP=soft_cap is not None, SINKS=sinks is not None, HAS_ENDS=has_ends,
        FP8=fp8, V_LANE=values.stride(3),
        SINGLE=single, PHASED=not (single or tiling.invariant or window is not None),
        DIRTY=dirty and fp8 != OFF, SPLIT=tiling.merges, KEYS_FIRST=tiling.keys_first,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, **options(q.device),
    )  # fmt: skip
    if tiling.merges:
        merge(target, lse, out[tokens.start : tokens.stop], tiling)
    return out


def _check(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    fits = keys.shape[:3] == values.shape[:3] and keys.shape[3] == q.shape[2] and q.shape[1] % keys.shape[2] == 0
    if not fits or q.stride(2) != 1 or keys.stride(3) != 1 or 1 not in (values.stride(3), values.stride(1)):
        shapes = ", ".join(f"{list(t.shape)} by {t.stride()}" for t in (q, keys, values))
        raise ValueError(f"q, keys and values do not fit each other: {shapes}")
    if k_scale is None and v_scale is None:
        return
    check_scales(keys, k_scale, v_scale)
    if k_scale is not None and v_scale is not None:
        check_same_strides(k_scale, v_scale)
