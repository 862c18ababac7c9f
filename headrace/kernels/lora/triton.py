"""Low-rank products of any tokens with their adapters: A in one kernel, B in another. Reference:
``headrace.kernels.lora.reference``.

A program has a tile of tokens. Where tokens are few, it has one place for adapters too, and leaves at once if no token of its
tile has the adapter there; where they are many, it goes through the places of its tokens' adapters, one after the other. So
neither the order of the tokens nor the number of adapters has a part in what is launched, and a CUDA graph serves every step of
its size. Tokens without an adapter are not written.
"""

# A kernel's arguments have no types of Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton.language as tl

from headrace.kernels.support import cdiv, power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import begin, options

_FEW, _MANY = 16, 64
"""Tokens of a tile, of steps with few tokens and of others."""
_FEW_TOKENS = 256
"""Most tokens of a step that has few."""
_CHANNELS = 128
"""Channels at a time."""
_SHARE, _SHARES = 256, 32
"""Least channels of x that one program sums where tokens are few, and most programs that share a token: the few tiles of such a
step alone would leave most of a GPU idle."""
_COLUMNS = 64
"""Most columns of A's product of a tile, and as many of them at a time in B's."""
_ABREAST = 8192
"""Numbers of A's product that a program adds up at once."""
_OUTPUTS = 128
"""Outputs of a tile."""
_PARTS = 3
"""Most fused matrices of a layer whose ends are arguments."""


@launched(do_not_specialize=["tokens"])
def _shrink(
    x, a, places, low, tokens, x_row: tl.int64, a_place: tl.int64, IN: tl.constexpr, WIDTH: tl.constexpr, SHARE: tl.constexpr,
    NUM_PLACES: tl.constexpr, APART: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """``low[share, token] = A x`` over a share of the channels. ``APART``: a program has one place."""
    begin(PDL)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    share = tl.program_id(1)
    across_places: tl.constexpr = NUM_PLACES if APART else 1
    column = tl.program_id(2) // across_places * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(2) % across_places
    last = first + 1 if APART else NUM_PLACES
    place = tl.load(places + token, mask=token < tokens, other=-1)
    held = (place >= first) & (place < last)
    if tl.max(held.to(tl.int32), 0) > 0:
        across = column < WIDTH
        sums = tl.zeros([TOKENS, COLUMNS], tl.float32)
        for index in range(first, last):
            own = place == index
            if tl.max(own.to(tl.int32), 0) > 0:
                matrix = a + index * a_place
                product = tl.zeros([TOKENS, COLUMNS], tl.float32)
                for start in range(share * SHARE, tl.minimum(share * SHARE + SHARE, IN), CHANNELS):
                    channel = start + tl.arange(0, CHANNELS)
                    inside = channel < IN
                    rows = x + token.to(tl.int64)[:, None] * x_row + channel[None, :]
                    left = tl.load(rows, mask=own[:, None] & inside[None, :], other=0.0)
                    columns = matrix + column[None, :] * IN + channel[:, None]
                    right = tl.load(columns, mask=across[None, :] & inside[:, None], other=0.0)
                    product = tl.dot(left, right, product, input_precision=PRECISION)
                # Others' tokens are not multiplied by zeros: an adapter that is not finite would spoil them.
                sums = tl.where(own[:, None], product, sums)
        target = low + (share.to(tl.int64) * tokens + token)[:, None] * WIDTH + column[None, :]
        tl.store(target, sums, mask=held[:, None] & across[None, :])


@launched(do_not_specialize=["tokens"])
def _expand(
    low, b, places, y, tokens, y_row: tl.int64, b_place: tl.int64, END_0: tl.constexpr, END_1: tl.constexpr,
    END_2: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, SHARES: tl.constexpr, NUM_PLACES: tl.constexpr,
    ABREAST: tl.constexpr, APART: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Adds B to a tile of outputs of one part. The parts end at ``END_0`` to ``END_2``; those behind the last are empty."""
    begin(PDL)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    start_place = tl.program_id(2)
    end_place = start_place + 1 if APART else NUM_PLACES
    place = tl.load(places + token, mask=token < tokens, other=-1)
    held = (place >= start_place) & (place < end_place)
    if tl.max(held.to(tl.int32), 0) > 0:
        tile = tl.program_id(1)
        in_0: tl.constexpr = (END_0 + OUTPUTS - 1) // OUTPUTS
        in_1: tl.constexpr = in_0 + (END_1 - END_0 + OUTPUTS - 1) // OUTPUTS
        part = (tile >= in_0).to(tl.int32) + (tile >= in_1).to(tl.int32)
        first = tl.where(part == 0, 0, tl.where(part == 1, END_0, END_1))
        last = tl.where(part == 0, END_0, tl.where(part == 1, END_1, END_2))
        before = tl.where(part == 0, 0, tl.where(part == 1, in_0, in_1))
        output = first + (tile - before) * OUTPUTS + tl.arange(0, OUTPUTS)
        within = output < last
        sums = tl.zeros([TOKENS, OUTPUTS], tl.float32)
        for index in range(start_place, end_place):
            own = place == index
            if tl.max(own.to(tl.int32), 0) > 0:
                matrix = b + index * b_place
                product = tl.zeros([TOKENS, OUTPUTS], tl.float32)
                for start in range(0, RANK, COLUMNS):
                    column = start + tl.arange(0, COLUMNS)
                    inner = column < RANK
                    left = tl.zeros([TOKENS, COLUMNS], tl.float32)
                    present = own[None, :, None] & inner[None, None, :]
                    for some in range(0, SHARES, ABREAST):
                        share = some + tl.arange(0, ABREAST)
                        rows = low + (share[:, None] * tokens + token[None, :]).to(tl.int64)[:, :, None] * WIDTH + part * RANK
                        mask = present & (share < SHARES)[:, None, None]
                        left += tl.sum(tl.load(rows + column[None, None, :], mask=mask, other=0.0), 0)
                    columns = matrix + output.to(tl.int64)[None, :] * RANK + column[:, None]
                    right = tl.load(columns, mask=within[None, :] & inner[:, None], other=0.0)
                    product = tl.dot(left.to(right.dtype), right, product, input_precision=PRECISION)
                sums = tl.where(own[:, None], product, sums)
        target = y + token.to(tl.int64)[:, None] * y_row + output[None, :]
        mine = held[:, None] & within[None, :]
        total = tl.load(target, mask=mine, other=0.0).to(tl.float32) + sums
        tl.store(target, total.to(y.dtype.element_ty), mask=mine)


def add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    ends: Sequence[int],
    places: torch.Tensor,
    *,
    batch_invariant: bool = False,
) -> None:
    """``y += B (A x)`` in place: ``headrace.kernels.lora.add_lora`` by the place of each token.

    Args:
        places: ``[T]`` int32: token -> place of its adapter, or -1.
        batch_invariant: one shape of tiles for any number of tokens.

    Raises:
        ValueError: a tensor does not fit the others.
    """
    (tokens, width), (num_places, low_width, in_features), rank = y.shape, a.shape, b.shape[2]
    fits = x.shape == (tokens, in_features) and b.shape[:2] == (num_places, width) and len(places) == tokens
    if not fits or len(ends) > _PARTS or low_width != len(ends) * rank or ends[-1] != width:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (y, x, a, b, places))
        raise ValueError(f"y, x, a, b and places do not fit each other, or the parts {list(ends)}: {shapes}")
    if x.stride(1) != 1 or y.stride(1) != 1 or not (a.is_contiguous() and b.is_contiguous()) or a.dtype != x.dtype:
        raise ValueError("the last axes of x and y, and a and b, must be contiguous; and a must be of x's dtype")
    if not tokens:
        return
    few = batch_invariant or tokens <= _FEW_TOKENS
    tile = _FEW if few else _MANY
    share = max(_SHARE, cdiv(cdiv(in_features, _SHARES), _CHANNELS) * _CHANNELS) if few else in_features
    shares, tiles = cdiv(in_features, share), cdiv(tokens, tile)
    apart = num_places if few else 1
    low = torch.empty(shares, tokens, low_width, dtype=torch.float32, device=x.device)
    precision, launch = "ieee" if x.dtype == torch.float32 else "tf32", options(x.device)
    columns = _at_most(_COLUMNS, low_width)
    _shrink[(tiles, shares, cdiv(low_width, columns) * apart)](
        x, a, places, low, tokens, x.stride(0), a.stride(0), IN=in_features, WIDTH=low_width, SHARE=share,
        NUM_PLACES=num_places, APART=few, TOKENS=tile, CHANNELS=_CHANNELS, COLUMNS=columns, PRECISION=precision, num_warps=4,
        **launch,
    )  # fmt: skip
    bounds = (*ends, *[width] * (_PARTS - len(ends)))
    starts = (0, *bounds[:-1])
    inner = _at_most(_COLUMNS, rank)
    abreast = min(power_of_two(shares), max(1, _ABREAST // (tile * inner)))
    across = sum(cdiv(end - start, _OUTPUTS) for start, end in zip(starts, bounds, strict=True))
    _expand[(tiles, across, apart)](
        low, b, places, y, tokens, y.stride(0), b.stride(0), END_0=bounds[0], END_1=bounds[1], END_2=bounds[2], RANK=rank,
        WIDTH=low_width, SHARES=shares, NUM_PLACES=num_places, ABREAST=abreast, APART=few, TOKENS=tile, OUTPUTS=_OUTPUTS,
        COLUMNS=inner, PRECISION=precision, num_warps=4, num_stages=1 if few else 3, **launch,
    )  # fmt: skip


def _at_most(most: int, number: int) -> int:
    """A power of two that a number fits in, at least what a tile of ``tl.dot`` has; or ``most``, if that is less."""
    return min(most, max(16, power_of_two(number)))
