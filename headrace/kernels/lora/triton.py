"""Low-rank products of any tokens with their adapters: A in one kernel, B in another. Reference:
``headrace.kernels.lora.reference``.

A single token's products with A come from the kernel of its layer's own product (``kernels/linear/triton.py``), and it has
kernels of B of its own. For more tokens both kernels multiply a tile of tokens by the matrices of several places at once and
keep what belongs to each token. Matrices that no token of the tile has are not read. So neither the order of the tokens nor the
number of adapters has a part in what is launched, and a CUDA graph serves every step of its size. Tokens without an adapter are
not written.

B multiplies zeros for tokens of other adapters, so adapters must be finite.
"""

# A kernel's arguments have no types of Python's, and its tuples grow.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, disable-error-code=assignment

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from headrace.kernels.activation.triton import gated_product
from headrace.kernels.kv_cache.triton_fp8 import mode
from headrace.kernels.lora.reference import PARTS, LowRank
from headrace.kernels.support import cdiv, power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import announce, options, wait

_FEW_TOKENS = 256
"""Most tokens of a step that has few."""
_MANY_TOKENS = 2048
"""Tokens from which on there are tiles enough for a GPU, with few programs for the channels of one."""
_SHARES, _LEAST_SHARE = 16, 512
"""Most programs that share a token's channels where tokens are few, and channels of one of them, at least. For a single token
they are twice as many, and half as many."""
_CHANNELS = 128
"""Channels at a time."""
_AHEAD = 6
"""Most tiles of A that a program reads while the kernel before still runs."""
_COLUMNS = 64
"""Most columns of A's product of a tile, and as many of them at a time in B's."""
_SINGLE_TILE, _SINGLE_WARPS = 512, 4
"""Numbers of B that a program multiplies by a single token's products, and its warps."""
_WIDE = 16384
"""Outputs from which on there are enough tiles for larger ones."""


@dataclasses.dataclass(frozen=True)
class ShrinkTiling:
    """Sizes of a program that multiplies by A."""

    tokens: int
    columns: int
    share: int
    """Channels of x: few tiles of tokens alone would leave most of a GPU idle."""
    ahead: bool
    """A program reads all of its A while the kernel before still runs, and then all of its x at once."""
    stages: int = 3
    """Tiles on their way."""


@dataclasses.dataclass(frozen=True)
class ExpandTiling:
    """Sizes of a program that multiplies by B."""

    tokens: int
    outputs: int
    together: int
    """Most columns of several places that are multiplied at once."""
    num_warps: int


def shrink_tiling(tokens: int, in_features: int, width: int, *, batch_invariant: bool = False) -> ShrinkTiling:
    """Returns the sizes for A: one choice for any number of tokens if the result must not depend on it."""
    if batch_invariant or tokens <= _FEW_TOKENS:
        more = 1 if batch_invariant or tokens > 1 else 2
        share = max(_LEAST_SHARE // more, _whole(cdiv(in_features, _SHARES * more)))
        return ShrinkTiling(16 if batch_invariant or tokens <= 16 else 32, 16, share, share <= _AHEAD * _CHANNELS)
    shares = 8 if tokens <= _MANY_TOKENS else 2
    return ShrinkTiling(64, _at_most(_COLUMNS, width), max(_LEAST_SHARE, _whole(cdiv(in_features, shares))), False)


def expand_tiling(tokens: int, out_features: int, *, batch_invariant: bool = False) -> ExpandTiling:
    """Returns the sizes for B likewise."""
    if batch_invariant or tokens <= 16:
        return ExpandTiling(16, 128, 128, 4)
    if tokens <= _FEW_TOKENS:
        return ExpandTiling(64 if tokens > 32 and out_features >= _WIDE else 32, 128, 128, 4)
    return ExpandTiling(32, 256, 16, 4)


@triton.jit
def _channels(base, channel, present, start, IN: tl.constexpr):
    """Numbers of lines from channel ``start`` on: ``[lines, CHANNELS]``, zeros of lines that are not present."""
    inside = start + channel < IN
    return tl.load(base + start + channel[None, :], mask=present[:, None] & inside[None, :], other=0.0)


@launched(do_not_specialize=["tokens"])
def _shrink(
    x, a, places, low, tokens, x_row: tl.int64, a_place: tl.int64, IN: tl.constexpr, WIDTH: tl.constexpr, SHARE: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    """``low[share, token] = A x`` over a share of the channels: some columns of one place, for those tokens that have it."""
    announce(PDL)
    ACROSS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    share = tl.program_id(1)
    own = tl.program_id(2) // ACROSS
    column = tl.program_id(2) % ACROSS * COLUMNS + tl.arange(0, COLUMNS)
    held = tl.load(places + token, mask=token < tokens, other=-1) == own
    any_held = tl.max(held.to(tl.int32), 0) > 0
    present = (column < WIDTH) & any_held
    channel = tl.arange(0, CHANNELS)
    first = share * SHARE
    columns = a + own * a_place + (column * IN)[:, None]
    rows = x + token.to(tl.int64)[:, None] * x_row
    COUNT: tl.constexpr = SHARE // CHANNELS
    rights = ()
    if AHEAD:
        for ahead in tl.static_range(COUNT):
            rights += (_channels(columns, channel, present, first + ahead * CHANNELS, IN),)
    wait(PDL)
    if any_held:
        sums = tl.zeros([TOKENS, COLUMNS], tl.float32)
        if AHEAD:
            lefts = ()
            for step in tl.static_range(COUNT):
                lefts += (_channels(rows, channel, held, first + step * CHANNELS, IN),)
            for step in tl.static_range(COUNT):
                sums = tl.dot(lefts[step], tl.trans(rights[step]), sums, input_precision=PRECISION)
        else:
            for start in range(first, tl.minimum(first + SHARE, IN), CHANNELS):
                left = _channels(rows, channel, held, start, IN)
                right = _channels(columns, channel, present, start, IN)
                sums = tl.dot(left, tl.trans(right), sums, input_precision=PRECISION)
        target = low + (share.to(tl.int64) * tokens + token)[:, None] * WIDTH + column[None, :]
        tl.store(target, sums, mask=held[:, None] & (column < WIDTH)[None, :])


@triton.jit
def _lines_of_b(
    b, b_place, place, first, start, output, within, RANK: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """``[PLACES * COLUMNS, outputs]``: columns of B from ``start`` on, in places from ``first`` on; zeros of places that no
    token has."""
    index = first + tl.arange(0, PLACES)
    column = start + tl.arange(0, COLUMNS)
    used = tl.max((place[:, None] == index[None, :]).to(tl.int32), 0) > 0
    at = index.to(tl.int64)[:, None, None] * b_place + column[None, :, None] + output.to(tl.int64)[None, None, :] * RANK
    mask = used[:, None, None] & (column < RANK)[None, :, None] & within[None, None, :]
    return tl.reshape(tl.load(b + at, mask=mask, other=0.0), [PLACES * COLUMNS, output.shape[0]])


@launched(do_not_specialize=["tokens"])
def _expand(
    low, b, places, y, tokens, y_row: tl.int64, b_place: tl.int64, END_0: tl.constexpr, END_1: tl.constexpr,
    END_2: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, SHARES: tl.constexpr, NUM_PLACES: tl.constexpr,
    PLACES: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Adds B to a tile of outputs of one part. The parts end at ``END_0`` to ``END_2``; those behind the last are empty.
    ``PLACES`` are multiplied at once. ``WHOLE``: parts are whole tiles."""
    announce(PDL)
    ALL: tl.constexpr = PLACES >= NUM_PLACES and COLUMNS >= RANK
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    place = tl.load(places + token, mask=token < tokens, other=-1)
    tile = tl.program_id(1)
    in_0: tl.constexpr = (END_0 + OUTPUTS - 1) // OUTPUTS
    in_1: tl.constexpr = in_0 + (END_1 - END_0 + OUTPUTS - 1) // OUTPUTS
    part = (tile >= in_0).to(tl.int32) + (tile >= in_1).to(tl.int32)
    if WHOLE:
        output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
        within = output < END_2
    else:
        first = tl.where(part == 0, 0, tl.where(part == 1, END_0, END_1))
        last = tl.where(part == 0, END_0, tl.where(part == 1, END_1, END_2))
        before = tl.where(part == 0, 0, tl.where(part == 1, in_0, in_1))
        output = first + (tile - before) * OUTPUTS + tl.arange(0, OUTPUTS)
        within = output < last
    right = tl.zeros([PLACES * COLUMNS, OUTPUTS], b.dtype.element_ty)
    if ALL:
        right = _lines_of_b(b, b_place, place, 0, 0, output, within, RANK, PLACES, COLUMNS)
    wait(PDL)
    held = place >= 0
    if tl.max(held.to(tl.int32), 0) > 0:
        target = y + token.to(tl.int64)[:, None] * y_row + output[None, :]
        mine = held[:, None] & within[None, :]
        base = tl.load(target, mask=mine, other=0.0)
        sums = tl.zeros([TOKENS, OUTPUTS], tl.float32)
        inner = tl.arange(0, COLUMNS)
        for start in tl.static_range(0, RANK, COLUMNS):
            products = low + token.to(tl.int64)[:, None] * WIDTH + part * RANK + start + inner[None, :]
            present = held[:, None] & (start + inner < RANK)[None, :]
            left = tl.zeros([TOKENS, COLUMNS], tl.float32)
            for share in tl.static_range(SHARES):
                left += tl.load(products + share * tokens.to(tl.int64) * WIDTH, mask=present, other=0.0)
            for group in range(0, NUM_PLACES, PLACES):
                own = place[:, None] == (group + tl.arange(0, PLACES))[None, :]
                if tl.max(tl.max(own.to(tl.int32), 1), 0) > 0:
                    if not ALL:
                        right = _lines_of_b(b, b_place, place, group, start, output, within, RANK, PLACES, COLUMNS)
                    mixed = tl.where(own[:, :, None], left[:, None, :], 0.0)
                    mixed = tl.reshape(mixed, [TOKENS, PLACES * COLUMNS])
                    sums = tl.dot(mixed.to(right.dtype), right, sums, input_precision=PRECISION)
        tl.store(target, (base.to(tl.float32) + sums).to(y.dtype.element_ty), mask=mine)


@triton.jit
def _lines_of_one(b, place, b_place, output, OUT: tl.constexpr, RANK: tl.constexpr, RANK_P: tl.constexpr):
    """B of some outputs in one place, ``[outputs, RANK_P]``; zeros where there is no adapter."""
    column = tl.arange(0, RANK_P)[None, :]
    mask = ((output < OUT) & (place >= 0))[:, None] & (column < RANK)
    return tl.load(b + tl.maximum(place, 0) * b_place + output[:, None] * RANK + column, mask=mask, other=0.0)


@triton.jit
def _added_to_one(y, right, low, place, output, part, OUT: tl.constexpr, RANK: tl.constexpr):
    """Some outputs of one token and what B adds to them, rounded. ``part``: whose products each of them reads."""
    column = tl.arange(0, right.shape[1])[None, :]
    base = tl.load(y + output, mask=output < OUT, other=0.0)
    mask = ((output < OUT) & (place >= 0))[:, None] & (column < RANK)
    left = tl.load(low + part[:, None] * RANK + column, mask=mask, other=0.0)
    return (base.to(tl.float32) + tl.sum(right.to(tl.float32) * left, 1)).to(base.dtype)


@launched
def _expand_one(
    low, b, places, y, b_place: tl.int64, END_0: tl.constexpr, END_1: tl.constexpr, OUT: tl.constexpr, RANK: tl.constexpr,
    RANK_P: tl.constexpr, OUTPUTS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Adds B to some outputs of one token, whose products with A are one share."""
    announce(PDL)
    place = tl.load(places)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    right = _lines_of_one(b, place, b_place, output, OUT, RANK, RANK_P)
    wait(PDL)
    part = (output >= END_0).to(tl.int32) + (output >= END_1).to(tl.int32)
    total = _added_to_one(y, right, low, place, output, part, OUT, RANK)
    tl.store(y + output, total, mask=(output < OUT) & (place >= 0))


@launched
def _expand_gated(
    low, b, places, y, out, b_place: tl.int64, WIDTH: tl.constexpr, RANK: tl.constexpr, RANK_P: tl.constexpr,
    OUTPUTS: tl.constexpr, MODE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """``silu_mul`` of what ``_expand_one`` would write. Its parts are gate and up, of ``WIDTH`` outputs each."""
    announce(PDL)
    place = tl.load(places)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    of_gate = _lines_of_one(b, place, b_place, output, WIDTH, RANK, RANK_P)
    of_up = _lines_of_one(b + WIDTH * RANK, place, b_place, output, WIDTH, RANK, RANK_P)
    wait(PDL)
    gates = tl.zeros([OUTPUTS], tl.int32)
    gate = _added_to_one(y, of_gate, low, place, output, gates, WIDTH, RANK)
    up = _added_to_one(y + WIDTH, of_up, low, place, output, gates + 1, WIDTH, RANK)
    tl.store(out + output, gated_product(gate, up, False, MODE), mask=output < WIDTH)


def shrink(
    x: torch.Tensor,
    a: torch.Tensor,
    places: torch.Tensor,
    tiling: ShrinkTiling | None = None,
    *,
    batch_invariant: bool = False,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """``A x``: ``headrace.kernels.lora.shrink`` by the place of each token.

    Args:
        places: ``[T]`` int32: token -> place of its adapter, or -1.
        tiling: None: ``shrink_tiling``'s.
        dtype: of the result.

    Raises:
        ValueError: a tensor does not fit the others.
    """
    (tokens, in_features), (num_places, width, _) = x.shape, a.shape
    if a.shape[2] != in_features or len(places) != tokens:
        raise ValueError(f"x, a and places do not fit each other: {list(x.shape)}, {list(a.shape)}, {list(places.shape)}")
    if x.stride(1) != 1 or not a[0].is_contiguous() or a.dtype != x.dtype:
        raise ValueError("the last axis of x, and each place of a, must be contiguous; and a must be of x's dtype")
    tiling = tiling or shrink_tiling(tokens, in_features, width, batch_invariant=batch_invariant)
    shares = cdiv(in_features, tiling.share)
    low = torch.empty(shares, tokens, width, dtype=dtype, device=x.device)
    if tokens:
        _shrink[(cdiv(tokens, tiling.tokens), shares, num_places * cdiv(width, tiling.columns))](
            x, a, places, low, tokens, x.stride(0), a.stride(0), IN=in_features, WIDTH=width, SHARE=tiling.share,
            TOKENS=tiling.tokens, CHANNELS=_CHANNELS, COLUMNS=tiling.columns, AHEAD=tiling.ahead, PRECISION=_precision(x),
            num_warps=4, num_stages=tiling.stages, **options(x.device),
        )  # fmt: skip
    return low


def shrink_rounded(x: torch.Tensor, a: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """``headrace.kernels.lora.shrink_rounded``"""
    width = a.shape[1]
    tiling = ShrinkTiling(64, _at_most(_COLUMNS, width), _whole(x.shape[1]), False, 5)
    return shrink(x, a, places, tiling, dtype=x.dtype)[0]


def expand(
    added: LowRank, places: torch.Tensor, y: torch.Tensor, tiling: ExpandTiling | None = None, *, batch_invariant: bool = False
) -> None:
    """``y += B low``: ``headrace.kernels.lora.expand`` by the place of each token.

    Args:
        places: ``added.places``
        tiling: None: ``expand_tiling``'s.

    Raises:
        ValueError: a tensor does not fit the others.
    """
    low, b, ends = added.low, added.b, added.ends
    (tokens, width), (num_places, _, rank) = y.shape, b.shape
    fits = low.shape[1:] == (tokens, len(ends) * rank) and b.shape[1] == width and len(places) == tokens
    if not fits or len(ends) > PARTS or ends[-1] != width:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (low, b, places, y))
        raise ValueError(f"low, b, places and y do not fit each other, or the parts {list(ends)}: {shapes}")
    if y.stride(1) != 1 or not b[0].is_contiguous():
        raise ValueError("the last axis of y, and each place of b, must be contiguous")
    if not tokens:
        return
    bounds = (*ends, *[width] * (PARTS - len(ends)))
    if len(low) == tokens == 1 and tiling is None and not batch_invariant:
        outputs, sizes = _single_sizes(rank)
        _expand_one[(cdiv(width, outputs),)](
            low, b, places, y, b.stride(0), END_0=bounds[0], END_1=bounds[1], OUT=width, **sizes, **options(y.device)
        )
        return
    tiling = tiling or expand_tiling(tokens, width, batch_invariant=batch_invariant)
    starts = (0, *bounds[:-1])
    outputs = tiling.outputs
    across = sum(cdiv(end - start, outputs) for start, end in zip(starts, bounds, strict=True))
    inner = _at_most(_COLUMNS, rank)
    together = min(max(1, tiling.together // inner), power_of_two(num_places))
    _expand[(cdiv(tokens, tiling.tokens), across)](
        low, b, places, y, tokens, y.stride(0), b.stride(0), END_0=bounds[0], END_1=bounds[1], END_2=bounds[2], RANK=rank,
        WIDTH=len(ends) * rank, SHARES=len(low), NUM_PLACES=num_places, PLACES=together, TOKENS=tiling.tokens, OUTPUTS=outputs,
        COLUMNS=inner, WHOLE=not any(end % outputs for end in bounds), PRECISION=_precision(b), num_warps=tiling.num_warps,
        num_stages=1, **options(y.device),
    )  # fmt: skip


def expand_gated(added: LowRank, y: torch.Tensor) -> torch.Tensor:
    """``headrace.kernels.lora.expand_gated``

    Raises:
        ValueError: a tensor does not fit the others.
    """
    low, b, places, width, rank = added.low, added.b, added.places, y.shape[1] // 2, added.b.shape[2]
    if places is None or tuple(added.ends) != (width, 2 * width) or low.shape != (1, 1, 2 * rank) or y.shape != (1, b.shape[1]):
        raise ValueError(f"these are no products of one row with gate and up: {list(low.shape)}, {list(y.shape)}, {added.ends}")
    out = torch.empty(1, width, dtype=y.dtype, device=y.device)
    outputs, sizes = _single_sizes(rank)
    _expand_gated[(cdiv(width, outputs),)](
        low, b, places, y, out, b.stride(0), WIDTH=width, MODE=mode(y.device), **sizes, **options(y.device)
    )
    return out


def _single_sizes(rank: int) -> tuple[int, dict[str, int]]:
    """The outputs of a program that multiplies by B for a single token, and its keywords."""
    padded = power_of_two(rank)
    outputs = max(_SINGLE_TILE // padded, 1)
    return outputs, {"RANK": rank, "RANK_P": padded, "OUTPUTS": outputs, "num_warps": _SINGLE_WARPS}


def _whole(channels: int) -> int:
    return cdiv(channels, _CHANNELS) * _CHANNELS


def _precision(factor: torch.Tensor) -> str:
    return "ieee" if factor.dtype == torch.float32 else "tf32"


def _at_most(most: int, number: int) -> int:
    """A power of two that a number fits in, at least what a tile of ``tl.dot`` has; or ``most``, if that is less."""
    return min(most, max(16, power_of_two(number)))
