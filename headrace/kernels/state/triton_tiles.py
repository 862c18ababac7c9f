"""Prompts of the gated delta rule and of Mamba-2 in tiles of 64 tokens, by matrix products.

Tiles begin at a row's first token, and a program passes the state from one tile of a row to the next in order. So results are
bitwise the same for all cuts of a prompt at multiples of a tile, and whatever other rows there are. With c the sums of the
tile's log-decays, D the lower triangle of ``exp(c_i - c_j)``, and S the state before the tile, ``[key_dim, value_dim]``::

    A = inverse(I + strict_lower(beta_i * (k_i . k_j)) * D) * beta_j
    U = A (V - exp(c) K S)
    out = exp(c) Q S + (lower(Q K^T) * D) U
    S = exp(c_last) S + (exp(c_last - c) K)^T U

``_delta_products`` computes A and ``lower(Q K^T) * D`` of all tiles at once, and ``_delta_tiles`` the rest. Mamba-2 has no A:
its U are the inputs times their steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.state.metadata import TILE, Pending, StateMetadata
from headrace.kernels.support import cdiv, power_of_two, resources
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import begin, options

_VALUES, _MANY_VALUES = 32, 64
"""Value channels of a head's state of one program, and where programs of the former do not all run at once."""
_KEPT_FREE = 8 << 10
"""Bytes of a program's shared memory for layouts, beside the tiles."""


def _precision(dtype: torch.dtype) -> str:
    """The precision in which float32 numbers are multiplied, in a model of this dtype."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _inverse(lower, EXACT: tl.constexpr):
    """Returns the inverse of the identity plus a strictly lower triangular matrix of 64, from that of its blocks of 16 on the
    diagonal. Blocks are beside each other: whole matrices would take sixteen times as many operations."""
    blocks, within = _on_diagonal(lower, 4), tl.arange(0, 16)
    row, column = within[None, :, None], within[None, None, :]
    found = tl.where(row == column, 1.0, 0.0) - tl.where(row // 2 == column // 2, blocks, 0.0)
    # No static range: a product compiles for seconds.
    for level in range(1, 4):
        beside = (row >> (level + 1) == column >> (level + 1)) & (row >> level != column >> level)
        corner = tl.dot(tl.where(beside, blocks, 0.0), found, input_precision=EXACT)
        found -= tl.dot(found, corner, input_precision=EXACT)
    left, right = tl.split(tl.permute(tl.reshape(found, (2, 2, 16, 16)), (0, 2, 3, 1)))
    quarters = tl.permute(tl.reshape(_on_diagonal(lower, 2), (2, 2, 16, 2, 16)), (0, 2, 4, 1, 3))
    found = tl.reshape(tl.permute(_from_halves(left, right, quarters, EXACT), (0, 4, 1, 3, 2)), (2, 32, 32))
    left, right = tl.split(tl.permute(found, (1, 2, 0)))
    quarters = tl.permute(tl.reshape(lower, (2, 32, 2, 32)), (1, 3, 0, 2))
    return tl.reshape(tl.permute(_from_halves(left, right, quarters, EXACT), (3, 0, 2, 1)), (64, 64))


@triton.jit
def _on_diagonal(matrix, COUNT: tl.constexpr):
    """The ``COUNT`` blocks on a matrix's diagonal: ``[COUNT, size, size]``."""
    SIZE: tl.constexpr = matrix.shape[0] // COUNT
    one = tl.arange(0, COUNT)
    own = one[:, None, None, None] == one[None, None, :, None]
    return tl.sum(tl.where(own, tl.reshape(matrix, (COUNT, SIZE, COUNT, SIZE)), 0.0), 2)


@triton.jit
def _from_halves(left, right, quarters, EXACT: tl.constexpr):
    """The inverse in quarters by halves of columns and of rows, from those of its two blocks on the diagonal, and the matrix in
    quarters ``[..., 2, 2]`` by halves of rows and of columns."""
    first, _ = tl.split(quarters)
    _, below = tl.split(first)
    below = tl.dot(tl.dot(right, below, input_precision=EXACT), left, input_precision=EXACT)
    return tl.join(tl.join(left, tl.zeros_like(left)), tl.join(-below, right))


@launched(do_not_specialize=["heads", "decode_rows"])
def _delta_products(
    qkv, decay, beta, a_log, dt_bias, queries, keys, sums, solved, products, query_start, tile_rows, tile_starts, decode_rows,
    heads, beta_factor, scale, qkv_row: tl.int64, decay_row: tl.int64, beta_row: tl.int64, SHARE: tl.constexpr,
    DK: tl.constexpr, DK_P: tl.constexpr, TOKENS: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A tile of one key head, for the SHARE heads that have it: q and k of length 1, sums of log-decays ``[T, heads]``, and
    the two matrices ``[T, heads, TOKENS]``."""
    begin(PDL)
    tile, key_head = tl.program_id(1), tl.program_id(0)
    row = tl.load(tile_rows + tile)
    if row >= 0:
        place, channel = tl.arange(0, TOKENS), tl.arange(0, DK_P)
        key_heads = heads // SHARE
        first = tl.load(query_start + row) + (tile - tl.load(tile_starts + row - decode_rows)) * TOKENS
        token = (first + place).to(tl.int64)
        inside = token < tl.load(query_start + row + 1)
        mask = inside[:, None] & (channel < DK)[None, :]
        own = qkv + token[:, None] * qkv_row + key_head * DK + channel[None, :]
        q = tl.load(own, mask=mask, other=0.0).to(tl.float32)
        k = tl.load(own + key_heads * DK, mask=mask, other=0.0).to(tl.float32)
        q = (q * (tl.rsqrt(tl.sum(q * q, 1) + 1e-6) * scale)[:, None]).to(queries.dtype.element_ty)
        k = (k * tl.rsqrt(tl.sum(k * k, 1) + 1e-6)[:, None]).to(keys.dtype.element_ty)
        unit = (token[:, None] * key_heads + key_head) * DK + channel[None, :]
        tl.store(queries + unit, q, mask=mask)
        tl.store(keys + unit, k, mask=mask)
        kk = tl.dot(k, tl.trans(k), input_precision=EXACT)
        qk = tl.dot(q, tl.trans(k), input_precision=EXACT)
        earlier = place[:, None] > place[None, :]
        for share in range(SHARE):
            head = key_head * SHARE + share
            fade = tl.load(decay + token * decay_row + head, mask=inside, other=0.0).to(tl.float32)
            fade = -tl.exp(tl.load(a_log + head)) * softplus(fade + tl.load(dt_bias + head))
            total = tl.cumsum(tl.where(inside, fade, 0.0), 0)
            strength = tl.sigmoid(tl.load(beta + token * beta_row + head, mask=inside, other=0.0).to(tl.float32))
            strength = tl.where(inside, beta_factor * strength, 0.0)
            # The difference comes first: the exponential of a sum alone may be 0 or infinite.
            between = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
            lower = tl.where(earlier, strength[:, None] * kk * between, 0.0)
            inverse = _inverse(lower, EXACT) * strength[None, :]
            seen = tl.where(earlier | (place[:, None] == place[None, :]), qk * between, 0.0)
            base = token * heads + head
            tl.store(sums + base, total, mask=inside)
            matrix = base[:, None] * TOKENS + place[None, :]
            tl.store(solved + matrix, inverse.to(solved.dtype.element_ty), mask=inside[:, None])
            tl.store(products + matrix, seen.to(products.dtype.element_ty), mask=inside[:, None])


@launched(do_not_specialize=["heads", "first_row"])
def _delta_tiles(
    qkv, queries, keys, sums, solved, products, state, tokens, until, out, query_start, blocks, starts, first_row, heads,
    qkv_row: tl.int64, state_block: tl.int64, tokens_block: tl.int64, tokens_row: tl.int64, until_block: tl.int64,
    SHARE: tl.constexpr, DK: tl.constexpr, DK_P: tl.constexpr, DV: tl.constexpr, VALUES: tl.constexpr, TOKENS: tl.constexpr,
    PERIOD: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """``VALUES`` value channels of a head over all tiles of a row."""
    begin(PDL)
    head, row = tl.program_id(1), first_row + tl.program_id(2)
    place, channel = tl.arange(0, TOKENS), tl.arange(0, DK_P)
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    in_value, in_key = value < DV, channel < DK
    block = tl.load(blocks + row).to(tl.int64)
    live = block >= 0
    held_at = state + tl.maximum(block, 0) * state_block + (head * DV + value[None, :]) * DK + channel[:, None]
    whole = in_key[:, None] & in_value[None, :] & live
    held = tl.load(held_at, mask=whole, other=0.0).to(tl.float32)
    key_heads, key_head = heads // SHARE, head // SHARE
    first, end = tl.load(query_start + row), tl.load(query_start + row + 1)
    if PERIOD > 1:
        kept = tokens + tl.maximum(block, 0) * tokens_block
        written, start = until + tl.maximum(block, 0) * until_block + head * DV + value, tl.load(starts + row)
        begun = tl.where(live, tl.min(tl.load(written, mask=in_value & live, other=2147483647), 0), start)
        kept_sums = kept + key_heads * DK + heads * DV + head
        if begun < start:
            last = tl.load(kept_sums + (start - 1) % PERIOD * tokens_row)
            held = held * tl.exp(last)
            for position in range(begun, start):
                at = kept + position % PERIOD * tokens_row
                weight = tl.exp(tl.minimum(last - tl.load(kept_sums + position % PERIOD * tokens_row), 0.0))
                earlier = tl.load(at + key_heads * DK + head * DV + value, mask=in_value, other=0.0) * weight
                held += tl.load(at + key_head * DK + channel, mask=in_key, other=0.0)[:, None] * earlier[None, :]
        tl.store(written, start + end - first + tl.zeros_like(value), mask=in_value & live)
    for begins in range(first, end, TOKENS):
        token = (begins + place).to(tl.int64)
        inside = token < end
        unit = (token[:, None] * key_heads + key_head) * DK + channel[None, :]
        in_unit = inside[:, None] & in_key[None, :]
        base = token * heads + head
        matrix = base[:, None] * TOKENS + place[None, :]
        k = tl.load(keys + unit, mask=in_unit, other=0.0)
        q = tl.load(queries + unit, mask=in_unit, other=0.0)
        a = tl.load(solved + matrix, mask=inside[:, None], other=0.0)
        seen = tl.load(products + matrix, mask=inside[:, None], other=0.0)
        values = qkv + token[:, None] * qkv_row + 2 * key_heads * DK + head * DV + value[None, :]
        v = tl.load(values, mask=inside[:, None] & in_value[None, :], other=0.0).to(tl.float32)
        total = tl.load(sums + base, mask=inside, other=0.0)
        last = tl.load(sums + (tl.minimum(begins + TOKENS, end) - 1).to(tl.int64) * heads + head)
        fade = tl.exp(total)[:, None]
        known = held.to(k.dtype)
        missing = v - fade * tl.dot(k, known, input_precision=EXACT)
        update = tl.dot(a, missing.to(k.dtype), input_precision=EXACT)
        result = fade * tl.dot(q, known, input_precision=EXACT)
        result += tl.dot(seen, update.to(k.dtype), input_precision=EXACT)
        result = tl.where(live, result, 0.0).to(out.dtype.element_ty)
        tl.store(out + base[:, None] * DV + value[None, :], result, mask=inside[:, None] & in_value[None, :])
        faded = (tl.exp(last - total)[:, None] * update).to(k.dtype)
        held = tl.exp(last) * held + tl.dot(tl.trans(k), faded, input_precision=EXACT)
    tl.store(held_at, held.to(state.dtype.element_ty), mask=whole)


@launched(do_not_specialize=["heads", "first_row"])
def _space_tiles(
    xbc, dt, a_log, d, dt_bias, state, out, query_start, blocks, first_row, heads, least, most, xbc_row: tl.int64,
    dt_row: tl.int64, state_block: tl.int64, SHARE: tl.constexpr, SIZE: tl.constexpr, SIZE_P: tl.constexpr, WIDTH: tl.constexpr,
    VALUES: tl.constexpr, TOKENS: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """``VALUES`` channels of a head over all tiles of a row."""
    begin(PDL)
    head, row = tl.program_id(1), first_row + tl.program_id(2)
    place, channel = tl.arange(0, TOKENS), tl.arange(0, SIZE_P)
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    in_value, in_size = value < WIDTH, channel < SIZE
    block = tl.load(blocks + row).to(tl.int64)
    live = block >= 0
    held_at = state + tl.maximum(block, 0) * state_block + (head * WIDTH + value[None, :]) * SIZE + channel[:, None]
    whole = in_size[:, None] & in_value[None, :] & live
    held = tl.load(held_at, mask=whole, other=0.0).to(tl.float32)
    rate, added, factor = -tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head), tl.load(d + head)
    until = place[:, None] >= place[None, :]
    first, end = tl.load(query_start + row), tl.load(query_start + row + 1)
    for begins in range(first, end, TOKENS):
        token = (begins + place).to(tl.int64)
        inside = token < end
        own = xbc + token[:, None] * xbc_row
        group = own + heads * WIDTH + head // SHARE * SIZE + channel[None, :]
        in_group = inside[:, None] & in_size[None, :]
        # Products of bfloat16 read beyond shared memory here, as Triton 3.6 compiles them for Hopper GPUs.
        b = tl.load(group, mask=in_group, other=0.0).to(tl.float32)
        c = tl.load(group + heads // SHARE * SIZE, mask=in_group, other=0.0).to(tl.float32)
        x = tl.load(own + head * WIDTH + value[None, :], mask=inside[:, None] & in_value[None, :], other=0.0).to(tl.float32)
        delta = softplus(tl.load(dt + token * dt_row + head, mask=inside, other=0.0).to(tl.float32) + added)
        delta = tl.where(inside, tl.minimum(tl.maximum(delta, least), most), 0.0)
        fades = rate * delta
        total, last = tl.cumsum(fades, 0), tl.sum(fades, 0)
        between = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
        seen = tl.dot(c, tl.trans(b), input_precision=EXACT) * between * delta[None, :]
        result = tl.exp(total)[:, None] * tl.dot(c, held, input_precision=EXACT) + factor * x
        result += tl.dot(tl.where(until, seen, 0.0), x, input_precision=EXACT)
        result = tl.where(live, result, 0.0).to(out.dtype.element_ty)
        places = out + ((token * heads + head) * WIDTH)[:, None] + value[None, :]
        tl.store(places, result, mask=inside[:, None] & in_value[None, :])
        faded = (tl.exp(last - total) * delta)[:, None] * x
        held = tl.exp(last) * held + tl.dot(tl.trans(b), faded, input_precision=EXACT)
    tl.store(held_at, held.to(state.dtype.element_ty), mask=whole)


def delta_prompts(
    qkv: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    step: StateMetadata,
    beta_factor: int,
    pending: Pending | None,
    out: torch.Tensor,
) -> None:
    """The gated delta rule of the rows behind the decode rows; writes their tokens in ``out``. Each input's channels lie side
    by side, and a decay is that of a whole head."""
    heads, value_dim, key_dim = state.shape[1:]
    share = 2 * heads * key_dim // (qkv.shape[1] - heads * value_dim)
    tokens, key_heads = len(qkv), heads // share
    units = [torch.empty(tokens, key_heads, key_dim, dtype=qkv.dtype, device=qkv.device) for _ in range(2)]
    sums = torch.empty(tokens, heads, dtype=torch.float32, device=qkv.device)
    matrices = [torch.empty(tokens, heads, TILE, dtype=qkv.dtype, device=qkv.device) for _ in range(2)]
    tiles, channels = step.tiles, max(power_of_two(key_dim), 16)
    _delta_products[(key_heads, len(tiles.rows))](
        qkv, decay, beta, a_log, dt_bias, *units, sums, *matrices, step.query_start, *tiles, step.decode_rows, heads,
        float(beta_factor), key_dim**-0.5, qkv.stride(0), decay.stride(0), beta.stride(0), SHARE=share, DK=key_dim,
        DK_P=channels, TOKENS=TILE, EXACT=_precision(qkv.dtype), num_warps=2, **options(qkv.device),
    )  # fmt: skip
    programs = cdiv(value_dim, _VALUES) * heads * step.prompt_rows
    device = resources(qkv.device)
    widest = _VALUES if programs <= device.multiprocessors else _MANY_VALUES
    values = max(min(widest, power_of_two(value_dim)), 16)
    kept = (state, step.starts) if pending is None else pending
    stage = TILE * (2 * channels + 2 * TILE + values) * qkv.itemsize
    _delta_tiles[(cdiv(value_dim, values), heads, step.prompt_rows)](
        qkv, *units, sums, *matrices, state, *kept, out, step.query_start, step.blocks, step.starts, step.decode_rows, heads,
        qkv.stride(0), state.stride(0), *kept[0].stride()[:2], kept[1].stride(0), SHARE=share, DK=key_dim, DK_P=channels,
        DV=value_dim, VALUES=values, TOKENS=TILE, PERIOD=1 if pending is None else pending.tokens.shape[1] + 1,
        EXACT=_precision(qkv.dtype), num_warps=4,
        num_stages=1 if qkv.dtype == torch.float32 else 3 if 3 * stage <= device.shared_memory - _KEPT_FREE else 2,
        **options(qkv.device),
    )  # fmt: skip


def space_prompts(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    step: StateMetadata,
    dt_limit: tuple[float, float],
    out: torch.Tensor,
) -> None:
    """Mamba-2's recurrence of the rows behind the decode rows; writes their tokens in ``out``. Each input's channels lie side
    by side."""
    heads, width, size = state.shape[1:]
    values = max(min(_VALUES, power_of_two(width)), 16)
    _space_tiles[(cdiv(width, values), heads, step.prompt_rows)](
        xbc, dt, a_log, d, dt_bias, state, out, step.query_start, step.blocks, step.decode_rows, heads, *map(float, dt_limit),
        xbc.stride(0), dt.stride(0), state.stride(0), SHARE=2 * heads * size // (xbc.shape[1] - heads * width), SIZE=size,
        SIZE_P=max(power_of_two(size), 16), WIDTH=width, VALUES=values, TOKENS=TILE, EXACT=_precision(xbc.dtype), num_warps=4,
        num_stages=1, **options(xbc.device),
    )  # fmt: skip
