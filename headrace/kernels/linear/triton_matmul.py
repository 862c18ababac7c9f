"""Batch-invariant matrix products: every number is summed in one order, however many rows there
are. A library's product picks its kernel, and so its order, by the number of rows. Reference: ``torch.nn.functional.linear``.
"""

from __future__ import annotations

import torch
import triton.language as tl

from headrace.kernels.linear import triton_invariant
from headrace.kernels.support import cdiv
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import begin, options

_ROWS, _OUTPUTS, _CHANNELS = 64, 64, 64
"""Rows, outputs and channels of a tile. One shape for all launches: it settles the instruction, and with it the order within a
step of the sum."""
_BAND = 8
"""Tiles of rows that go through the outputs together, so that both factors stay in the cache."""


@launched(do_not_specialize=["rows"])
def _product(
    x, weight, bias, y, rows, x_row: tl.int64, x_head: tl.int64, weight_row: tl.int64, weight_head: tl.int64, y_row: tl.int64,
    y_head: tl.int64, IN: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, CHANNELS: tl.constexpr,
    BAND: tl.constexpr, BIAS: tl.constexpr, TURNED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A tile of one head's product. ``weight_row`` is from one output to the next, or with ``TURNED`` from one channel to the
    next; along the other axis numbers are neighbours."""
    begin(PDL)
    head = tl.program_id(1).to(tl.int64)
    x += head * x_head
    weight += head * weight_head
    y += head * y_head
    across: tl.constexpr = (OUT + OUTPUTS - 1) // OUTPUTS
    band = tl.program_id(0) // (BAND * across)
    within = tl.program_id(0) % (BAND * across)
    height = tl.minimum(tl.cdiv(rows, ROWS) - band * BAND, BAND)
    row = (band * BAND + within % height) * ROWS + tl.arange(0, ROWS)
    output = within // height * OUTPUTS + tl.arange(0, OUTPUTS)
    channel = tl.arange(0, CHANNELS)
    x_base = x + row.to(tl.int64)[:, None] * x_row
    weight_base = weight + output.to(tl.int64)[None, :] * (1 if TURNED else weight_row)
    sums = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, IN, CHANNELS):
        inside = start + channel
        left = tl.load(x_base + inside[None, :], mask=(row < rows)[:, None] & (inside < IN)[None, :], other=0.0)
        along = inside.to(tl.int64) * weight_row if TURNED else inside
        right = tl.load(weight_base + along[:, None], mask=(output < OUT)[None, :] & (inside < IN)[:, None], other=0.0)
        sums = tl.dot(left, right, sums, input_precision=PRECISION)
    if BIAS:
        sums += tl.load(bias + output, mask=output < OUT, other=0.0).to(tl.float32)[None, :]
    place = row.to(tl.int64)[:, None] * y_row + output[None, :]
    tl.store(y + place, sums.to(y.dtype.element_ty), mask=(row < rows)[:, None] & (output < OUT)[None, :])


def matmul(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``x W^T + bias``: bitwise the same for a row of x in any batch.

    Args:
        x: ``[rows, in]``, last axis contiguous.
        weight: ``[out, in]`` of x's dtype, last axis contiguous.
        bias: ``[out]``
        out_dtype: what the product is rounded to; None: x's dtype.

    Raises:
        ValueError: a tensor does not fit the others.
    """
    check_factors(x, weight)
    if x.itemsize == 2:
        return triton_invariant.matmul(x, weight, bias, out_dtype)
    y = torch.empty(len(x), len(weight), dtype=out_dtype or x.dtype, device=x.device)
    _launch(x.unsqueeze(1), weight.unsqueeze(0), bias, y.unsqueeze(1))
    return y


def check_factors(x: torch.Tensor, weight: torch.Tensor, most: int | None = None) -> None:
    """Raises ValueError if the factors of ``x W^T`` do not fit each other, or x has more than ``most`` rows."""
    if (most is not None and len(x) > most) or weight.shape != (len(weight), x.shape[1]) or weight.dtype != x.dtype:
        raise ValueError(f"{list(weight.shape)} {weight.dtype} does not fit x, {list(x.shape)} {x.dtype}")
    if x.stride(1) != 1 or weight.stride(1) != 1:
        raise ValueError("the last axes of x and weight must be contiguous")


def matmul_by_head(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """``out[t, h] = weight[h] x[t, h]``: bitwise the same for a row in any batch.

    Args:
        x: ``[rows, heads, in]``, last axis contiguous.
        weight: ``[heads, out, in]`` of x's dtype; one of the last two axes is contiguous.
        out: ``[rows, heads, out]``, last axis contiguous; filled.

    Raises:
        ValueError: a tensor does not fit the others.
    """
    rows, heads, in_features = x.shape
    if weight.shape[::2] != (heads, in_features) or out.shape != (rows, heads, weight.shape[1]) or weight.dtype != x.dtype:
        shapes = ", ".join(f"{list(t.shape)} {t.dtype}" for t in (x, weight, out))
        raise ValueError(f"x, weight and out do not fit each other: {shapes}")
    if x.stride(2) != 1 or out.stride(2) != 1 or 1 not in weight.stride()[1:]:
        raise ValueError("the last axes of x and out must be contiguous, and one of weight's last two")
    _launch(x, weight, None, out)


def _launch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor) -> None:
    """``x [rows, heads, in]``, ``weight [heads, out, in]``, ``y [rows, heads, out]``."""
    rows, heads, in_features = x.shape
    out_features = weight.shape[1]
    if not y.numel():
        return
    turned = weight.stride(2) != 1
    tiles = cdiv(rows, _ROWS) * cdiv(out_features, _OUTPUTS)
    _product[(tiles, heads)](
        x, weight, x if bias is None else bias, y, rows, x.stride(0), x.stride(1), weight.stride(2 if turned else 1),
        weight.stride(0), y.stride(0), y.stride(1), IN=in_features, OUT=out_features,
        ROWS=_ROWS, OUTPUTS=_OUTPUTS, CHANNELS=_CHANNELS, BAND=_BAND, BIAS=bias is not None, TURNED=turned,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=4, num_stages=3 if x.itemsize > 2 else 4, **options(x.device),
    )  # fmt: skip
