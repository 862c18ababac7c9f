"""The addition of adapters in the kernel of another product: ``B low`` joins its sums before these are rounded.

A program reads B before the kernel before is complete and A's products as soon as it is, but needs neither before it has summed
its own product: so it waits for them while its weights are on the way.
"""

# A kernel's arguments have no types of Python's, and its tuples grow.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, disable-error-code=assignment

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from headrace.kernels.lora.reference import LowRank
from headrace.kernels.support import power_of_two

_TOGETHER = 128
"""Most columns of several places that are multiplied at once."""
_COLUMNS = 64
"""Most columns of one place that are."""
PARTS = 3
"""Most fused matrices of a layer."""


@triton.jit
def _first_column(first, END_0: tl.constexpr, END_1: tl.constexpr, RANK: tl.constexpr):
    """The first column of A's product that a tile of outputs reads. It has none of two parts."""
    return ((first >= END_0).to(tl.int32) + (first >= END_1).to(tl.int32)) * RANK


@triton.jit
def lines_of_b(
    b, place, group, start, output, present, b_place, RANK: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """``[outputs, PLACES * COLUMNS]``: columns of B from ``start`` on, in places from ``group`` on; zeros of places that no
    token has."""
    index, column = group + tl.arange(0, PLACES), start + tl.arange(0, COLUMNS)
    used = tl.max((index[:, None] == place[None, :]).to(tl.int32), 1) > 0
    at = index.to(tl.int64)[None, :, None] * b_place + output.to(tl.int64)[:, None, None] * RANK + column[None, None, :]
    mask = present[:, None, None] & used[None, :, None] & (column < RANK)[None, None, :]
    return tl.reshape(tl.load(b + at, mask=mask, other=0.0), [output.shape[0], PLACES * COLUMNS])


@triton.jit
def shares_of_low(
    low, place, token, tokens, first, start, END_0: tl.constexpr, END_1: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr,
    SHARES: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """``SHARES`` times ``[COLUMNS, tokens]``: A's products from column ``start`` on, for outputs from ``first`` on."""
    column = start + tl.arange(0, COLUMNS)
    at = low + token.to(tl.int64)[None, :] * WIDTH + _first_column(first, END_0, END_1, RANK) + column[:, None]
    mask = (place >= 0)[None, :] & (column < RANK)[:, None]
    shares = ()
    for share in tl.static_range(SHARES):
        shares += (tl.load(at + share * tokens.to(tl.int64) * WIDTH, mask=mask, other=0.0),)
    return shares


@triton.jit
def _total(shares, SHARES: tl.constexpr):
    total = shares[0]
    for share in tl.static_range(1, SHARES):
        total += shares[share]
    return total


@triton.jit
def add(
    sums, right, shares, low, b, place, token, tokens, first, output, present, b_place, END_0: tl.constexpr,
    END_1: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, SHARES: tl.constexpr, COLUMNS: tl.constexpr,
    NUM_PLACES: tl.constexpr, PLACES: tl.constexpr, AT_ONCE: tl.constexpr
):  # fmt: skip
    """``sums [outputs, tokens]`` and what the adapters of the tokens add.

    ``right``, ``shares``: all of B and of A's products, if they are multiplied AT_ONCE.
    """
    if AT_ONCE:
        sums = tl.dot(right, _by_place(_total(shares, SHARES), place, 0, PLACES).to(right.dtype), sums)
    elif tl.max(place, 0) >= 0:
        for start in tl.static_range(0, RANK, COLUMNS):
            parts = shares_of_low(low, place, token, tokens, first, start, END_0, END_1, RANK, WIDTH, SHARES, COLUMNS)
            left = _total(parts, SHARES)
            for group in tl.range(0, NUM_PLACES, PLACES, num_stages=1):
                if tl.max(((place >= group) & (place < group + PLACES)).to(tl.int32), 0) > 0:
                    lines = lines_of_b(b, place, group, start, output, present, b_place, RANK, PLACES, COLUMNS)
                    sums = tl.dot(lines, _by_place(left, place, group, PLACES).to(lines.dtype), sums)
    return sums


@triton.jit
def _by_place(left, place, group, PLACES: tl.constexpr):
    """``[PLACES * columns, tokens]``: a token's products at the columns of its own place."""
    own = (group + tl.arange(0, PLACES))[:, None] == place[None, :]
    return tl.reshape(tl.where(own[:, None, :], left[None, :, :], 0.0), [PLACES * left.shape[0], left.shape[1]])


def tensors(added: LowRank | None, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Returns ``low``, ``b``, ``places`` and the stride of b's places. No adapters: ``other``, which is not read."""
    if added is None or added.places is None:
        return other, other, other, 0
    return added.low, added.b, added.places, added.b.stride(0)


def sizes(added: LowRank | None) -> dict[str, Any]:
    """Returns the constants of ``add``; and ADAPTED, whether there are adapters."""
    if added is None:
        names = ("END_0", "END_1", "RANK", "WIDTH", "SHARES", "COLUMNS", "NUM_PLACES", "PLACES")
        return {"ADAPTED": False, "AT_ONCE": False, **dict.fromkeys(names, 0)}
    num_places, _, rank = added.b.shape
    ends = (*added.ends, *[added.ends[-1]] * PARTS)
    columns = min(_COLUMNS, max(16, power_of_two(rank)))
    together = min(_TOGETHER // columns, power_of_two(num_places))
    return {
        "ADAPTED": True, "END_0": ends[0], "END_1": ends[1], "RANK": rank, "WIDTH": added.low.shape[2],
        "SHARES": len(added.low), "COLUMNS": columns, "NUM_PLACES": num_places, "PLACES": together,
        "AT_ONCE": together >= num_places and columns >= rank,
    }  # fmt: skip


def takes(added: LowRank, outputs: int) -> bool:
    """Whether a kernel with tiles of so many outputs can add it: none has outputs of two parts."""
    return added.places is not None and len(added.ends) <= PARTS and not any(end % outputs for end in added.ends)
