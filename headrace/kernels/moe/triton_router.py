"""The product of a router: a token's logit for each expert, of weights in float32. Reference: ``headrace.kernels.moe``."""

# A kernel's arguments have no types of Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton.language as tl

from headrace.kernels.support import cdiv, power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import announce, options, wait

_ROWS = 4
"""Rows of a program, which reads the weight once for them."""


@launched(do_not_specialize=["rows"])
def _router_logits(
    x,
    weight,
    bias,
    logits,
    rows,
    x_row: tl.int64,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
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
        x,
        weight,
        weight if bias is None else bias,
        logits,
        rows,
        x.stride(0),
        IN=in_features,
        OUT=out_features,
        ROWS=at_once,
        OUTPUTS=outputs,
        CHANNELS=min(power_of_two(in_features), 1024 if outputs == 1 else 256),
        BIAS=bias is not None,
        num_warps=4,
        **options(x.device),
    )
    return logits
