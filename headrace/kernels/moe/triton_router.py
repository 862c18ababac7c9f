"""The product of a router: a token's logit for each expert, of weights in float32. Reference: ``headrace.kernels.moe``."""

from __future__ import annotations

import dataclasses

import torch
import triton.language as tl

from headrace.kernels.linear.triton_fp8_wide import gather_sums
from headrace.kernels.linear.triton_invariant import turns_of
from headrace.kernels.support import cdiv, power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import announce, begin, options, wait

_ROWS = 4
"""Rows of a program, which reads the weight once for them."""


@launched(do_not_specialize=["rows"])
def _router_logits(
    x, weight, bias, logits, rows, x_row: tl.int64, IN: tl.constexpr, OUT: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, CHANNELS: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A few experts' logits of a few tokens."""
    announce(PDL)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, CHANNELS)
    base = weight + output.to(tl.int64)[:, None] * IN + channel[None, :]
    present = (output < OUT)[:, None]
    x_base = x + row.to(tl.int64)[:, None] * x_row + channel[None, :]
    sums = tl.zeros([ROWS, OUTPUTS, CHANNELS], tl.float32)
    # Loads the weight's first channels while the previous kernel still runs.
    part = tl.load(base, mask=present & (channel < IN)[None, :], other=0.0)
    wait(PDL)
    for start in tl.static_range(0, IN, CHANNELS):
        inside = (start + channel < IN)[None, :]
        factor = tl.load(x_base + start, mask=(row < rows)[:, None] & inside, other=0.0).to(tl.float32)
        here = part
        if start + CHANNELS < IN:
            ahead = (start + CHANNELS + channel < IN)[None, :]
            part = tl.load(base + start + CHANNELS, mask=present & ahead, other=0.0)
        sums += factor[:, None, :] * here[None, :, :]
    result = tl.sum(sums, 2)
    if BIAS:
        result += tl.load(bias + output, mask=output < OUT, other=0.0)[None, :]
    place = row.to(tl.int64)[:, None] * OUT + output[None, :]
    tl.store(logits + place, result, mask=(row < rows)[:, None] & (output < OUT)[None, :])


def router_logits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.moe.router_logits``, for few rows."""
    rows, in_features = x.shape
    out_features = len(weight)
    logits = torch.empty(rows, out_features, dtype=torch.float32, device=x.device)
    if not rows:
        return logits
    at_once = min(power_of_two(rows), _ROWS)
    outputs = 1 if rows <= _ROWS else 4
    _router_logits[(cdiv(out_features, outputs), cdiv(rows, at_once))](
        x, weight, weight if bias is None else bias, logits, rows, x.stride(0), IN=in_features, OUT=out_features, ROWS=at_once,
        OUTPUTS=outputs, CHANNELS=min(power_of_two(in_features), 1024 if outputs == 1 else 256), BIAS=bias is not None,
        num_warps=4, **options(x.device),
    )  # fmt: skip
    return logits


@dataclasses.dataclass(frozen=True)
class RouterTiling:
    """Sizes of a program that makes ``outputs`` logits of ``rows`` rows, and the programs that share the channels of a tile."""

    outputs: int
    rows: int
    channels: int
    num_warps: int
    num_stages: int
    splits: int = 1


_SOME, _MANY = RouterTiling(64, 64, 64, 4, 3, splits=4), RouterTiling(64, 128, 64, 4, 3)
"""The fastest of those measured on an H200, with 128 experts and 2,048 channels, for fewer rows than ``_LONG`` and for more."""
_LONG = 8192


@launched(do_not_specialize=["rows"])
def _router_tiles(
    x, weight, bias, logits, parts, turns, rows, x_row: tl.int64, IN: tl.constexpr, OUT: tl.constexpr, OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A tile of logits, of bfloat16 x. Three numbers of bfloat16 add up to a weight exactly, and matrix units take them."""
    begin(PDL)
    across: tl.constexpr = (OUT + OUTPUTS - 1) // OUTPUTS
    tile, split = tl.program_id(0), tl.program_id(1)
    output = tile % across * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tile // across * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, CHANNELS)
    weight_base = weight + output.to(tl.int64)[:, None] * IN + channel[None, :]
    x_base = x + row.to(tl.int64)[None, :] * x_row + channel[:, None]
    STEPS: tl.constexpr = (IN + CHANNELS - 1) // CHANNELS
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for step in range(split * STEPS // SPLITS, (split + 1) * STEPS // SPLITS):
        start = step * CHANNELS
        inside = start + channel < IN
        part = tl.load(weight_base + start, mask=(output < OUT)[:, None] & inside[None, :], other=0.0)
        right = tl.load(x_base + start, mask=(row < rows)[None, :] & inside[:, None], other=0.0)
        high = part.to(tl.bfloat16)
        rest = part - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        sums = tl.dot(low, right, sums)
        sums = tl.dot(middle, right, sums)
        sums = tl.dot(high, right, sums)
    done = True
    if SPLITS > 1:
        done, sums = gather_sums(sums, parts, turns, tile, SPLITS, OUTPUTS, ROWS)
    if done:
        if BIAS:
            sums += tl.load(bias + output, mask=output < OUT, other=0.0)[:, None]
        place = logits + row.to(tl.int64)[:, None] * OUT + output[None, :]
        tl.store(place, tl.trans(sums), mask=(row < rows)[:, None] & (output < OUT)[None, :])


def router_tiles(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, tiling: RouterTiling | None = None
) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.moe.router_logits``, for many rows of bfloat16.

    ``tiling`` replaces the one chosen by size.
    """
    (rows, in_features), out_features = x.shape, len(weight)
    tiling = tiling or (_SOME if rows < _LONG else _MANY)
    logits = torch.empty(rows, out_features, dtype=torch.float32, device=x.device)
    tiles = cdiv(out_features, tiling.outputs) * cdiv(rows, tiling.rows)
    parts = turns = logits
    if tiling.splits > 1:
        size = tiles * tiling.splits * tiling.outputs * tiling.rows
        parts, turns = torch.empty(size, dtype=torch.float32, device=x.device), turns_of(x.device)
    _router_tiles[(tiles, tiling.splits)](
        x, weight, weight if bias is None else bias, logits, parts, turns, rows, x.stride(0), IN=in_features,
        OUT=out_features, OUTPUTS=tiling.outputs, ROWS=tiling.rows, CHANNELS=tiling.channels, SPLITS=tiling.splits,
        BIAS=bias is not None, num_warps=tiling.num_warps, num_stages=tiling.num_stages, **options(x.device),
    )  # fmt: skip
    return logits
