"""One tile of attention, queries against keys of a paged cache: what attention kernels share.

A tile has queries along one axis and keys along the other; ``KEYS_FIRST`` says which comes first. A head is cut into two parts,
of ``D_A`` and ``D_B`` channels (see ``tiling.cut``). Reference: ``headrace.kernels.attention.reference``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.kv_cache.triton_fp8 import gain, to_half


@triton.jit
def find_row(query_start, tile, num_rows, first_token, BLOCK_Q: tl.constexpr):
    """The row that a tile of queries belongs to, and the row's first tile: ``tokens before it // BLOCK_Q + row``."""
    low = 0
    high = num_rows
    while low < high:
        middle = (low + high) // 2
        if (tl.load(query_start + middle) - first_token) // BLOCK_Q + middle <= tile:
            low = middle + 1
        else:
            high = middle
    row = tl.maximum(low - 1, 0)
    return row, (tl.load(query_start + row) - first_token) // BLOCK_Q + row


@triton.jit
def per_query(x, KEYS_FIRST: tl.constexpr):
    """``[queries]``, spread over a tile."""
    if KEYS_FIRST:
        return x[None, :]
    else:
        return x[:, None]


@triton.jit
def per_key(x, KEYS_FIRST: tl.constexpr):
    """``[keys]``, spread over a tile."""
    if KEYS_FIRST:
        return x[:, None]
    else:
        return x[None, :]


@triton.jit
def load_part(
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
def operand(stored, DTYPE: tl.constexpr, FP8: tl.constexpr):
    """Converts numbers from the cache to a factor of a matrix product."""
    if FP8 > 0:
        return to_half(stored, FP8)
    else:
        return stored.to(DTYPE)


@triton.jit
def product(of_queries, of_keys, acc, KEYS_FIRST: tl.constexpr, PRECISION: tl.constexpr):
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
    """Scores of the keys at ``base``, in base 2. What is not a key gets any number: every address is a valid one."""
    if KEYS_FIRST:
        scores = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    k_a = load_part(base, present, 0, D, D_A, 1, KEYS_FIRST, False)
    scores = product(q_a, operand(k_a, q_a.dtype, FP8), scores, KEYS_FIRST, PRECISION)
    if D_B > 0:
        k_b = load_part(base, present, D_A, D, D_B, 1, KEYS_FIRST, False)
        scores = product(q_b, operand(k_b, q_b.dtype, FP8), scores, KEYS_FIRST, PRECISION)
    scores = scores * factor
    if SOFT_CAP:
        # tanh x is 2 sigmoid(2 x) - 1.
        scores = (soft_cap * 1.4426950408889634) * (2.0 * tl.sigmoid(2.0 * scores / soft_cap) - 1.0)
    return scores


@triton.jit
def places(table, start, last_block, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
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
def first_seen(position, window, WINDOW: tl.constexpr):
    """The first position that a token sees: of a window that slides, or that begins at multiples of its length."""
    if WINDOW == 2:
        return position - position % window
    else:
        return tl.maximum(0, position - window + 1)


@triton.jit
def _seen(
    key, present, position, last_seen, window, WINDOW: tl.constexpr, SINGLE: tl.constexpr, KEYS_FIRST: tl.constexpr
):  # fmt: skip
    """Returns the mask of the keys that each query of a tile sees; a row's only query sees the keys that are present."""
    seen = per_key(present, KEYS_FIRST)
    if not SINGLE:
        seen = seen & (per_key(key, KEYS_FIRST) <= per_query(last_seen, KEYS_FIRST))
        if WINDOW:
            seen = seen & (per_key(key, KEYS_FIRST) >= per_query(first_seen(position, window, WINDOW), KEYS_FIRST))
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
def take_tile(
    start, low, high, highest, total, acc_a, acc_b, q_a, q_b, peak, position, last_seen, factor, soft_cap, window,
    keys, values, k_scales, v_scales, table, k_block, k_offset, v_block, v_offset, scale_block, scale_offset,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, D_A: tl.constexpr,
    D_B: tl.constexpr, DV: tl.constexpr, DV_A: tl.constexpr, DV_B: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, FP8: tl.constexpr, V_LANE: tl.constexpr, KEYS_FIRST: tl.constexpr,
    PRECISION: tl.constexpr, DIRTY: tl.constexpr, SINGLE: tl.constexpr, MASKED: tl.constexpr, ORDERED: tl.constexpr = False
):  # fmt: skip
    """Takes in the ``BLOCK_N`` keys from ``start`` on, a multiple of ``BLOCK_N``; of these only ``[low, high)`` count.

    ``highest`` is the running maximum of scores, ``acc_a``, ``acc_b`` are the sums of values weighed by ``exp2``, and
    ``total`` that of the weights: keys first, each place of the tile has its own, as ``spread`` makes them, so that threads
    meet once a tile and not twice. Not ``MASKED``: every query sees every key.

    In FP8 the size of a value's scale, a power of two, is part of its score: the weights that multiply e4m3 numbers are then
    below 2, and most of what counts is not far below, which float16 has digits for. ``total`` is free of it.
    """
    axis: tl.constexpr = 0 if KEYS_FIRST else 1
    n = tl.arange(0, BLOCK_N)
    key = start + n
    present = key < high
    if WINDOW:
        # Keys before low may be another row's by now: a window gives blocks back. Without one, low is a tile's first key.
        present = present & (key >= low)
    block, offset = places(table, start, (high - 1) // BLOCK_SIZE, BLOCK_SIZE, BLOCK_N)
    base = keys + block * k_block + offset * k_offset
    if FP8 > 0:
        place = block * scale_block + offset * scale_offset
        k_scale = tl.load(k_scales + place, mask=present, other=0.0) * (factor * gain(FP8))
        tile_factor = per_key(k_scale, KEYS_FIRST) * per_query(peak, KEYS_FIRST)
        v_scale = tl.load(v_scales + place, mask=present, other=1.0)
        v_size, v_rest, v_inverse = _parts(v_scale)
    else:
        tile_factor = factor
    scores = _scores(
        q_a, q_b, base, present, tile_factor, soft_cap, BLOCK_M, BLOCK_N, D, D_A, D_B, SOFT_CAP, FP8, KEYS_FIRST, PRECISION
    )  # fmt: skip
    if FP8 > 0:
        scores += per_key(v_size, KEYS_FIRST)
    if MASKED:
        seen = _seen(key, present, position, last_seen, window, WINDOW, SINGLE, KEYS_FIRST)
        scores = tl.where(seen, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, axis))
    pivot = new_highest
    if MASKED:
        # A query without keys so far keeps weight 0 instead of exp2(-inf - -inf).
        pivot = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp2(scores - per_query(pivot, KEYS_FIRST))
    decay = tl.exp2(highest - pivot)
    highest = new_highest
    masses = weights
    if FP8 > 0:
        masses = weights * per_key(v_inverse, KEYS_FIRST)
        weights = weights * per_key(v_rest, KEYS_FIRST)
        if MASKED:
            # The scale of a key that a query does not see may be NaN.
            weights = tl.where(seen, weights, 0.0)
    if KEYS_FIRST:
        total = total * per_query(decay, KEYS_FIRST) + masses
    elif not ORDERED:
        total = total * decay + tl.sum(masses, axis)
    weights = weights.to(q_a.dtype)
    if ORDERED:
        total = tl.dot(weights, tl.full([BLOCK_N, 16], 1.0, weights.dtype), total * decay[:, None])
    # e4m3 that is not DIRTY is finite: weight 0 is enough for what is not a key. A mask by token would part its loads.
    shielded: tl.constexpr = MASKED and FP8 == 0
    if V_LANE == 1:
        base = values + block * v_block + offset * v_offset
    else:
        base = values + block * v_block + offset
    v_a = load_part(base, present, 0, DV, DV_A, V_LANE, not KEYS_FIRST, shielded)
    if MASKED and DIRTY:
        v_a = tl.where(per_key(present, not KEYS_FIRST), v_a, 0)
    acc_a = acc_a * per_query(decay, KEYS_FIRST)
    acc_a = product(weights, operand(v_a, q_a.dtype, FP8), acc_a, KEYS_FIRST, PRECISION)
    if DV_B > 0:
        v_b = load_part(base, present, DV_A, DV, DV_B, V_LANE, not KEYS_FIRST, shielded)
        if MASKED and DIRTY:
            v_b = tl.where(per_key(present, not KEYS_FIRST), v_b, 0)
        acc_b = acc_b * per_query(decay, KEYS_FIRST)
        acc_b = product(weights, operand(v_b, q_a.dtype, FP8), acc_b, KEYS_FIRST, PRECISION)
    return highest, total, acc_a, acc_b


@triton.jit
def load_queries(
    base, valid, BLOCK_M: tl.constexpr, D: tl.constexpr, D_A: tl.constexpr, D_B: tl.constexpr, FP8: tl.constexpr,
    KEYS_FIRST: tl.constexpr
):  # fmt: skip
    """The tile's queries in two parts, and what they must be multiplied with."""
    channels: tl.constexpr = 0 if KEYS_FIRST else 1
    q_a = load_part(base, valid, 0, D, D_A, 1, not KEYS_FIRST, True)
    q_b = q_a
    if D_B > 0:
        q_b = load_part(base, valid, D_A, D, D_B, 1, not KEYS_FIRST, True)
    peak = tl.full([BLOCK_M], 1.0, tl.float32)
    if FP8 > 0:
        # One instruction makes two e4m3 numbers float16, so q becomes float16 too, brought into its range.
        peak = tl.max(tl.abs(q_a.to(tl.float32)), channels)
        if D_B > 0:
            peak = tl.maximum(peak, tl.max(tl.abs(q_b.to(tl.float32)), channels))
        peak = tl.where(peak == 0.0, 1.0, peak)
        q_a = (q_a.to(tl.float32) / per_query(peak, KEYS_FIRST)).to(tl.float16)
        if D_B > 0:
            q_b = (q_b.to(tl.float32) / per_query(peak, KEYS_FIRST)).to(tl.float16)
    return q_a, q_b, peak


@triton.jit
def spread(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KEYS_FIRST: tl.constexpr, ORDERED: tl.constexpr = False):
    """The sum of weights before the first key."""
    if KEYS_FIRST:
        return tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    elif ORDERED:
        return tl.zeros([BLOCK_M, 16], tl.float32)
    else:
        return tl.zeros([BLOCK_M], tl.float32)


@triton.jit
def finish(
    sinks, head, valid, split, position, split_tokens, highest, total, SINKS: tl.constexpr, SPLIT: tl.constexpr,
    FP8: tl.constexpr, KEYS_FIRST: tl.constexpr, ORDERED: tl.constexpr = False
):  # fmt: skip
    """The maximum and the sum of weights, sinks included, and what the sums of values must be multiplied with."""
    if KEYS_FIRST:
        total = tl.sum(total, 0)
    elif ORDERED:
        # All are the same.
        total = tl.max(total, 1)
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
def zeros(BLOCK_M: tl.constexpr, WIDTH_P: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """A sum of values for each query."""
    if KEYS_FIRST:
        return tl.zeros([WIDTH_P, BLOCK_M], tl.float32)
    else:
        return tl.zeros([BLOCK_M, WIDTH_P], tl.float32)


@triton.jit
def store_output(
    target, acc, inverse, valid, FIRST: tl.constexpr, WIDTH: tl.constexpr, WIDTH_P: tl.constexpr, KEYS_FIRST: tl.constexpr
):  # fmt: skip
    channel = FIRST + tl.arange(0, WIDTH_P)
    result = acc * per_query(inverse, KEYS_FIRST)
    mask = per_query(valid, KEYS_FIRST) & per_key(channel < WIDTH, KEYS_FIRST)
    pointers = per_query(target, KEYS_FIRST) + per_key(channel, KEYS_FIRST)
    tl.store(pointers, result.to(target.dtype.element_ty), mask=mask)
