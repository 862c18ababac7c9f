"""The addition of adapters in the kernel of another product: ``B low`` joins its sums before these are rounded.

What a program reads for it comes at its start, while its weights are on the way. At its end nothing would hide the wait.
"""

# A kernel's arguments have no types of Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

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
def first_column(first, END_0: tl.constexpr, END_1: tl.constexpr, RANK: tl.constexpr):
    """The first column of A's product that a tile of outputs reads. It has none of two parts."""
    return ((first >= END_0).to(tl.int32) + (first >= END_1).to(tl.int32)) * RANK


@triton.jit
def added_sums(
    low, b, places, token, tokens, first, output, present, b_place, END_0: tl.constexpr, END_1: tl.constexpr,
    RANK: tl.constexpr, WIDTH: tl.constexpr, SHARES: tl.constexpr, NUM_PLACES: tl.constexpr, PLACES: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """``[outputs, tokens]``: what the adapters of the tokens add; zeros for tokens without one."""
    added = tl.zeros([output.shape[0], token.shape[0]], tl.float32)
    place = tl.load(places + token, mask=token < tokens, other=-1)
    held = place >= 0
    if tl.max(place, 0) >= 0:
        inner = tl.arange(0, COLUMNS)
        column = first_column(first, END_0, END_1, RANK) + inner
        for start in tl.static_range(0, RANK, COLUMNS):
            products = low + token.to(tl.int64)[None, :] * WIDTH + start + column[:, None]
            mask = held[None, :] & (start + inner < RANK)[:, None]
            left = tl.zeros([COLUMNS, token.shape[0]], tl.float32)
            for share in tl.static_range(SHARES):
                left += tl.load(products + share * tokens.to(tl.int64) * WIDTH, mask=mask, other=0.0)
            for group in tl.range(0, NUM_PLACES, PLACES, num_stages=1):
                index = group + tl.arange(0, PLACES)
                own = index[:, None] == place[None, :]
                used = tl.max(own.to(tl.int32), 1) > 0
                if tl.max(used.to(tl.int32), 0) > 0:
                    at = index.to(tl.int64)[None, :, None] * b_place + output.to(tl.int64)[:, None, None] * RANK
                    at += start + inner[None, None, :]
                    mask_b = present[:, None, None] & used[None, :, None] & (start + inner < RANK)[None, None, :]
                    right = tl.reshape(tl.load(b + at, mask=mask_b, other=0.0), [output.shape[0], PLACES * COLUMNS])
                    mixed = tl.where(own[:, None, :], left[None, :, :], 0.0)
                    mixed = tl.reshape(mixed, [PLACES * COLUMNS, token.shape[0]]).to(right.dtype)
                    added = tl.dot(right, mixed, added, input_precision=PRECISION)
    return added


@triton.jit
def all_of_b(b, place, output, present, b_place, RANK: tl.constexpr, PLACES: tl.constexpr, COLUMNS: tl.constexpr):
    """``[PLACES * COLUMNS, outputs]``: B of each place that a token has, and zeros."""
    index, inner = tl.arange(0, PLACES), tl.arange(0, COLUMNS)
    used = tl.max((place[:, None] == index[None, :]).to(tl.int32), 0) > 0
    at = index.to(tl.int64)[:, None, None] * b_place + output.to(tl.int64)[None, None, :] * RANK + inner[None, :, None]
    mask = used[:, None, None] & (inner < RANK)[None, :, None] & present[None, None, :]
    return tl.reshape(tl.load(b + at, mask=mask, other=0.0), [PLACES * COLUMNS, output.shape[0]])


@triton.jit
def low_of(
    low, place, token, tokens, first, END_0: tl.constexpr, END_1: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr,
    SHARES: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """``[tokens, COLUMNS]``: A's products; zeros for tokens without an adapter."""
    inner = tl.arange(0, COLUMNS)
    at = token[:, None] * WIDTH + first_column(first, END_0, END_1, RANK) + inner[None, :]
    mask = (place >= 0)[:, None] & (inner < RANK)[None, :]
    left = tl.zeros([token.shape[0], COLUMNS], tl.float32)
    for share in tl.static_range(SHARES):
        left += tl.load(low + share * tokens * WIDTH + at, mask=mask, other=0.0)
    return left


@triton.jit
def by_place(left, place, PLACES: tl.constexpr, COLUMNS: tl.constexpr):
    """``[tokens, PLACES * COLUMNS]``: a token's products at the columns of its own place."""
    own = place[:, None] == tl.arange(0, PLACES)[None, :]
    return tl.reshape(tl.where(own[:, :, None], left[:, None, :], 0.0), [left.shape[0], PLACES * COLUMNS])


def tensors(added: LowRank | None, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Returns ``low``, ``b``, ``places`` and the stride of b's places. No adapters: ``other``, which is not read."""
    if added is None or added.places is None:
        return other, other, other, 0
    return added.low, added.b, added.places, added.b.stride(0)


def sizes(added: LowRank | None, *, at_once: int = 0) -> dict[str, Any]:
    """The constants of ``added_sums``, but for PRECISION; and ADAPTED, whether there are adapters.

    Args:
        at_once: all columns of all places are multiplied at once, of so many at the least; 0: they are not.
    """
    if added is None:
        names = ("END_0", "END_1", "RANK", "WIDTH", "SHARES", "NUM_PLACES", "PLACES", "COLUMNS")
        return {"ADAPTED": False, **dict.fromkeys(names, 0)}
    num_places, _, rank = added.b.shape
    ends = (*added.ends, *[added.ends[-1]] * PARTS)
    columns = max(16, power_of_two(rank))
    if not at_once:
        columns = min(_COLUMNS, columns)
    places = power_of_two(num_places)
    return {
        "ADAPTED": True, "END_0": ends[0], "END_1": ends[1], "RANK": rank, "WIDTH": added.low.shape[2],
        "SHARES": len(added.low), "NUM_PLACES": num_places, "COLUMNS": columns,
        "PLACES": max(places, at_once // columns) if at_once else min(max(1, _TOGETHER // columns), places),
    }  # fmt: skip


def takes(added: LowRank, outputs: int) -> bool:
    """Whether a kernel with tiles of so many outputs can add it: none has outputs of two parts."""
    return added.places is not None and len(added.ends) <= PARTS and not any(end % outputs for end in added.ends)
