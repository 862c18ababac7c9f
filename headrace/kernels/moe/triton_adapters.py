"""Adapters of experts: A in a kernel of its own, and B in those of the experts' products, before the activation and the weights
of choices. Reference: ``headrace.kernels.moe.reference.moe_mlp``.

Tiles have the rows of one expert, and each takes the matrices of that expert alone, of the adapters that its rows have.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from headrace.kernels.moe.triton_codecs import along
from headrace.kernels.moe.triton_sort import Routing, tile_rows
from headrace.kernels.support import cdiv, power_of_two
from headrace.kernels.triton_pdl import begin, options

_CHANNELS, _COLUMNS = 128, 64
"""Channels, and columns of A's product, at a time."""


class ExpertsLow(NamedTuple):
    """A's products, and what they are to be multiplied by."""

    low: torch.Tensor
    """``[choices, parts * rank]`` float32, by order; anything for choices without an adapter."""
    b: torch.Tensor
    """``[places, experts * outputs, rank]``"""
    places: torch.Tensor
    """``[T]`` int32: token -> place of its adapter, or -1."""


@triton.jit(do_not_specialize=["x_row"])
def _shrink_experts(
    x, a, places, order, start, low, x_row: tl.int64, a_place: tl.int64, TOP_K: tl.constexpr, EXPERTS: tl.constexpr,
    EXPERTS_P: tl.constexpr, SORTED: tl.constexpr, BY_ORDER: tl.constexpr, IN: tl.constexpr, WIDTH: tl.constexpr,
    NUM_PLACES: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    """Some columns of ``A x`` for a tile of one expert. BY_ORDER: rows of x are choices by order, and tokens otherwise."""
    begin(PDL)
    expert, place, used, choice = tile_rows(order, start, tl.program_id(0), EXPERTS, EXPERTS_P, TOKENS, SORTED)
    if expert == EXPERTS:
        return
    token = choice // TOP_K
    adapter = tl.load(places + token, mask=used, other=-1)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    channel = tl.arange(0, CHANNELS)
    rows = x + (place if BY_ORDER else token).to(tl.int64)[:, None] * x_row
    lines = a + ((expert.to(tl.int64) * WIDTH + column) * IN)[:, None]
    for one in tl.range(NUM_PLACES, num_stages=1):
        own = adapter == one
        if tl.max(own.to(tl.int32), 0) > 0:
            sums = tl.zeros([TOKENS, COLUMNS], tl.float32)
            for first in range(0, IN, CHANNELS):
                inside = (first + channel)[None, :] < IN
                left = tl.load(rows + (first + channel)[None, :], mask=own[:, None] & inside, other=0.0)
                at = one * a_place + (first + channel)[None, :]
                right = tl.load(lines + at, mask=(column < WIDTH)[:, None] & inside, other=0.0)
                sums = tl.dot(left, tl.trans(right), sums, input_precision=PRECISION)
            target = low + place.to(tl.int64)[:, None] * WIDTH + column[None, :]
            tl.store(target, sums, mask=own[:, None] & (column < WIDTH)[None, :])


@triton.jit
def with_added(
    sums, low, b, places, token, place, used, matrix, part: tl.constexpr, output, b_place, OUT: tl.constexpr,
    PARTS: tl.constexpr, RANK: tl.constexpr, NUM_PLACES: tl.constexpr, COLUMNS: tl.constexpr, SWAP: tl.constexpr,
    PRECISION: tl.constexpr
):  # fmt: skip
    """A tile's ``sums`` and what the adapters of its rows add; other rows keep their bits. ``matrix``: the first of the
    expert's, of ``OUT`` outputs each."""
    adapter = tl.load(places + token, mask=used, other=-1)
    if tl.max(adapter, 0) >= 0:
        added = tl.zeros(sums.shape, tl.float32)
        inner = tl.arange(0, COLUMNS)
        lines = b + (((matrix + part).to(tl.int64) * OUT + output) * RANK)[:, None]
        products = low + (place.to(tl.int64) * (PARTS * RANK) + part * RANK)[:, None]
        for one in tl.range(NUM_PLACES, num_stages=1):
            own = adapter == one
            if tl.max(own.to(tl.int32), 0) > 0:
                for start in tl.static_range(0, RANK, COLUMNS):
                    column = (start + inner)[None, :]
                    left = tl.load(products + column, mask=own[:, None] & (column < RANK), other=0.0)
                    mask = (output < OUT)[:, None] & (column < RANK)
                    right = tl.load(lines + one * b_place + column, mask=mask, other=0.0)
                    if SWAP:
                        added = tl.dot(right, tl.trans(left.to(right.dtype)), added, input_precision=PRECISION)
                    else:
                        added = tl.dot(left.to(right.dtype), tl.trans(right), added, input_precision=PRECISION)
        sums = tl.where(along(adapter >= 0, not SWAP), sums + added, sums)
    return sums


def shrink(
    x: torch.Tensor,
    factors: tuple[torch.Tensor, torch.Tensor],
    places: torch.Tensor | None,
    routing: Routing,
    top_k: int,
    *,
    by_order: bool = False,
) -> ExpertsLow:
    """Multiplies rows of x by A of their adapters and experts.

    Args:
        factors: A, ``[places, experts * parts * rank, IN]``, and B.
        by_order: x has a row for each choice, by order; otherwise for each token.

    Raises:
        ValueError: the adapters of tokens are not given by their places.
    """
    if places is None:
        raise ValueError("the kernels take the places of tokens' adapters")
    a, b = factors
    num_places, lines, size_in = a.shape
    width = lines // routing.experts
    low = torch.empty(routing.choices, width, dtype=torch.float32, device=x.device)
    columns = min(_COLUMNS, max(16, power_of_two(width)))
    tokens = 16 if routing.choices <= 16 * routing.experts else 64
    _shrink_experts[(routing.tiles(tokens), cdiv(width, columns))](
        x, a, places, routing.order, routing.start, low, x.stride(0), a.stride(0), TOP_K=top_k, BY_ORDER=by_order, IN=size_in,
        WIDTH=width, NUM_PLACES=num_places, TOKENS=tokens, CHANNELS=_CHANNELS, COLUMNS=columns,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=4, num_stages=3, **routing.sizes,
        **options(x.device),
    )  # fmt: skip
    return ExpertsLow(low, b, places)


def tensors(added: ExpertsLow | None, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Returns the tensors of ``added`` and the stride of b's places. No adapters: ``other``, which is not read."""
    return (other, other, other, 0) if added is None else (*added, added.b.stride(0))


def constants(added: ExpertsLow | None) -> dict[str, Any]:
    """The constants of ``with_added`` that depend on the adapters. RANK is 0 where there are none."""
    if added is None:
        return {"RANK": 0, "NUM_PLACES": 0, "COLUMNS": 0}
    rank = added.b.shape[2]
    return {"RANK": rank, "NUM_PLACES": len(added.b), "COLUMNS": min(_COLUMNS, max(16, power_of_two(rank)))}
