"""The addition of adapters in the kernels of other products: ``B low`` joins their sums before these are rounded."""

# A kernel's arguments have no types of Python's, and its tuples grow.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators, disable-error-code=assignment

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from headrace.kernels.lora.reference import LowRank
from headrace.kernels.support import power_of_two

_COLUMNS = 64
"""Most columns of one place that are multiplied at once."""
_EARLY = 128
"""Columns of B of all places, at most, that are read before the sums are made."""
PARTS = 3
"""Most fused matrices of a layer."""


@triton.jit
def part_of(first, END_0: tl.constexpr, END_1: tl.constexpr):
    """The part of a tile of outputs, none of which are of two."""
    return (first >= END_0).to(tl.int32) + (first >= END_1).to(tl.int32)


@triton.jit
def _lines_of_b(
    b, place, one, output, present, b_place, START: tl.constexpr, RANK: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """``[outputs, COLUMNS]`` of B in a place; zeros where no token has it."""
    column = START + tl.arange(0, COLUMNS)
    used = tl.max((place == one).to(tl.int32), 0) > 0
    at = output.to(tl.int64)[:, None] * RANK + column[None, :]
    mask = present[:, None] & (column < RANK)[None, :] & used
    return tl.load(b + one * b_place + at, mask=mask, other=0.0)


@triton.jit
def early_b(
    b, place, output, present, b_place, RANK: tl.constexpr, NUM_PLACES: tl.constexpr, COLUMNS: tl.constexpr,
    EARLY: tl.constexpr
):  # fmt: skip
    """The lines of B for ``with_added``, on their way while the sums are made: no kernel writes them. Not EARLY: none."""
    lines = ()
    if EARLY:
        for one in tl.static_range(NUM_PLACES):
            for start in tl.static_range(0, RANK, COLUMNS):
                lines += (_lines_of_b(b, place, one, output, present, b_place, start, RANK, COLUMNS),)
    return lines


@triton.jit
def _low(
    low, place, token, tokens, first, START: tl.constexpr, END_0: tl.constexpr, END_1: tl.constexpr, RANK: tl.constexpr,
    WIDTH: tl.constexpr, SHARES: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """``[COLUMNS, tokens]`` of A's product."""
    inner = START + tl.arange(0, COLUMNS)
    column = part_of(first, END_0, END_1) * RANK + inner
    products = low + token.to(tl.int64)[None, :] * WIDTH + column[:, None]
    mask = (place >= 0)[None, :] & (inner < RANK)[:, None]
    left = tl.zeros([COLUMNS, token.shape[0]], tl.float32)
    for share in tl.static_range(SHARES):
        left += tl.load(products + share * tokens.to(tl.int64) * WIDTH, mask=mask, other=0.0)
    return left


@triton.jit
def with_added(
    sums, early, low, b, place, token, tokens, first, output, present, b_place, END_0: tl.constexpr, END_1: tl.constexpr,
    RANK: tl.constexpr, WIDTH: tl.constexpr, SHARES: tl.constexpr, NUM_PLACES: tl.constexpr, COLUMNS: tl.constexpr,
    EARLY: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """``sums``, ``[outputs, tokens]``, and what the adapters in the places of the tokens add to them. Other tokens keep their
    bits."""
    added = tl.zeros(sums.shape, tl.float32)
    for start in tl.static_range(0, RANK, COLUMNS):
        left = _low(low, place, token, tokens, first, start, END_0, END_1, RANK, WIDTH, SHARES, COLUMNS)
        if EARLY:
            for one in tl.static_range(NUM_PLACES):
                if tl.max((place == one).to(tl.int32), 0) > 0:
                    right = early[one * ((RANK + COLUMNS - 1) // COLUMNS) + start // COLUMNS]
                    own = tl.where((place == one)[None, :], left, 0.0).to(right.dtype)
                    added = tl.dot(right, own, added, input_precision=PRECISION)
        else:
            for one in tl.range(NUM_PLACES, num_stages=1):
                if tl.max((place == one).to(tl.int32), 0) > 0:
                    right = _lines_of_b(b, place, one, output, present, b_place, start, RANK, COLUMNS)
                    own = tl.where((place == one)[None, :], left, 0.0).to(right.dtype)
                    added = tl.dot(right, own, added, input_precision=PRECISION)
    return tl.where((place >= 0)[None, :], sums + added, sums)


def tensors(added: LowRank | None, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Returns ``low``, ``b``, ``places`` and the stride of b's places. No adapters: ``other``, which is not read."""
    if added is None or added.places is None:
        return other, other, other, 0
    return added.low, added.b, added.places, added.b.stride(0)


def sizes(added: LowRank | None) -> dict[str, Any]:
    """The constants of ``with_added``, but for PRECISION; and ADAPTED, whether there are adapters."""
    if added is None:
        names = ("END_0", "END_1", "RANK", "WIDTH", "SHARES", "NUM_PLACES", "COLUMNS", "EARLY")
        return {"ADAPTED": False, **dict.fromkeys(names, 0)}
    num_places, _, rank = added.b.shape
    ends = (*added.ends, *[added.ends[-1]] * PARTS)
    columns = min(_COLUMNS, max(16, power_of_two(rank)))
    return {
        "ADAPTED": True, "END_0": ends[0], "END_1": ends[1], "RANK": rank, "WIDTH": added.low.shape[2],
        "SHARES": len(added.low), "NUM_PLACES": num_places, "COLUMNS": columns,
        "EARLY": num_places * -(-rank // columns) * columns <= _EARLY,
    }  # fmt: skip


def takes(added: LowRank, outputs: int) -> bool:
    """Whether a kernel with tiles of so many outputs can add it."""
    b = added.b
    parts = len(added.ends) <= PARTS and not any(end % outputs for end in added.ends)
    return parts and added.places is not None and b[0].is_contiguous()
