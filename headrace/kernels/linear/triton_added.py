"""The addition of adapters in the kernel of another product: ``B low`` joins its sums before these are rounded."""

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
def _part(first, END_0: tl.constexpr, END_1: tl.constexpr):
    """The part of a tile of outputs, none of which are of two."""
    return (first >= END_0).to(tl.int32) + (first >= END_1).to(tl.int32)


@triton.jit
def with_added(
    sums, low, b, places, token, tokens, first, output, present, b_place, END_0: tl.constexpr, END_1: tl.constexpr,
    RANK: tl.constexpr, WIDTH: tl.constexpr, SHARES: tl.constexpr, NUM_PLACES: tl.constexpr, PLACES: tl.constexpr,
    COLUMNS: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """``sums``, ``[outputs, tokens]``, and what the adapters of the tokens add to them. Other tokens keep their bits."""
    place = tl.load(places + token, mask=token < tokens, other=-1)
    held = place >= 0
    if tl.max(place, 0) >= 0:
        added = tl.zeros(sums.shape, tl.float32)
        inner = tl.arange(0, COLUMNS)
        column = _part(first, END_0, END_1) * RANK + inner
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
        sums = tl.where(held[None, :], sums + added, sums)
    return sums


def tensors(added: LowRank | None, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Returns ``low``, ``b``, ``places`` and the stride of b's places. No adapters: ``other``, which is not read."""
    if added is None or added.places is None:
        return other, other, other, 0
    return added.low, added.b, added.places, added.b.stride(0)


def sizes(added: LowRank | None) -> dict[str, Any]:
    """The constants of ``with_added``, but for PRECISION; and ADAPTED, whether there are adapters."""
    if added is None:
        names = ("END_0", "END_1", "RANK", "WIDTH", "SHARES", "NUM_PLACES", "PLACES", "COLUMNS")
        return {"ADAPTED": False, **dict.fromkeys(names, 0)}
    num_places, _, rank = added.b.shape
    ends = (*added.ends, *[added.ends[-1]] * PARTS)
    columns = min(_COLUMNS, max(16, power_of_two(rank)))
    return {
        "ADAPTED": True, "END_0": ends[0], "END_1": ends[1], "RANK": rank, "WIDTH": added.low.shape[2],
        "SHARES": len(added.low), "NUM_PLACES": num_places, "COLUMNS": columns,
        "PLACES": min(max(1, _TOGETHER // columns), power_of_two(num_places)),
    }  # fmt: skip


def takes(added: LowRank, outputs: int) -> bool:
    """Whether a kernel with tiles of so many outputs can add it: none has outputs of two parts."""
    return added.places is not None and len(added.ends) <= PARTS and not any(end % outputs for end in added.ends)
