"""Pooling of a prompt's keys and the router of its heads. Reference: ``headrace.kernels.head_routing.reference``.

A program has one head of one sequence, so that no bit depends on what else is in the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.head_routing.reference import RouterWeights
from headrace.kernels.support import power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import begin, options

_TOKENS = 32
"""Keys at a time."""
_NUMBERS = 4096
"""Numbers of a weight that are read at a time."""


@launched(do_not_specialize_on_alignment=["key_start"])
def _pool_keys(
    keys, key_start, pooled, key_token: tl.int64, key_head: tl.int64, HEADS: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr,
    TOKENS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    start = tl.load(key_start + row)
    end = tl.load(key_start + row + 1)
    channel = tl.arange(0, D_P)
    sums = tl.zeros([D_P], tl.float32)
    for first in range(start, end, TOKENS):
        token = first + tl.arange(0, TOKENS)
        base = keys + token.to(tl.int64) * key_token + head * key_head
        present = (token < end)[:, None] & (channel < D)[None, :]
        sums += tl.sum(tl.load(base[:, None] + channel[None, :], mask=present, other=0.0).to(tl.float32), 0)
    mean = sums / tl.maximum(end - start, 1).to(tl.float32)
    tl.store(pooled + (row * HEADS + head) * D + channel, mean, mask=channel < D)


def pool_keys(keys: torch.Tensor, key_start: torch.Tensor) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.head_routing.pool_keys``."""
    rows, (heads, width) = len(key_start) - 1, keys.shape[1:]
    pooled = torch.empty(rows, heads, width, dtype=torch.float32, device=keys.device)
    _pool_keys[(rows, heads)](
        keys, key_start, pooled, keys.stride(0), keys.stride(1), HEADS=heads, D=width, D_P=power_of_two(width),
        TOKENS=_TOKENS, num_warps=4, **options(keys.device),
    )  # fmt: skip
    return pooled


@triton.jit
def _silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def _mlp(
    x, inner, inner_bias, outer, outer_bias, D: tl.constexpr, D_P: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """``outer silu(inner x + inner_bias) + outer_bias`` for ``inner [WIDTH, D]`` and ``outer [D, WIDTH]``."""
    channel = tl.arange(0, D_P)
    inside = channel < D
    result = tl.load(outer_bias + channel, mask=inside, other=0.0).to(tl.float32)
    for start in range(0, WIDTH, STEP):
        hidden = start + tl.arange(0, STEP)
        present = (hidden < WIDTH)[:, None] & inside[None, :]
        weight = tl.load(inner + hidden[:, None] * D + channel[None, :], mask=present, other=0.0).to(tl.float32)
        bias = tl.load(inner_bias + hidden, mask=hidden < WIDTH, other=0.0).to(tl.float32)
        activated = _silu(tl.sum(weight * x[None, :], 1) + bias)
        weight = tl.load(outer + channel[None, :] * WIDTH + hidden[:, None], mask=present, other=0.0).to(tl.float32)
        result += tl.sum(weight * activated[:, None], 0)
    return result


@launched
def _route(
    pooled, w0, b0, w1, b1, w2, b2, w3, b3, w4, b4, classes, D: tl.constexpr, D_P: tl.constexpr, WIDTH: tl.constexpr,
    STEP: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    begin(PDL)
    spot = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, D_P)
    inside = channel < D
    x = tl.load(pooled + spot * D + channel, mask=inside, other=0.0)
    x = _mlp(x, w0, b0, w1, b1, D, D_P, WIDTH, STEP)
    x = _silu(_mlp(x, w2, b2, w3, b3, D, D_P, WIDTH, STEP))
    sparse = tl.sum(tl.load(w4 + channel, mask=inside, other=0.0).to(tl.float32) * x, 0) + tl.load(b4).to(tl.float32)
    retrieval = tl.sum(tl.load(w4 + D + channel, mask=inside, other=0.0).to(tl.float32) * x, 0)
    retrieval += tl.load(b4 + 1).to(tl.float32)
    tl.store(classes + spot, (retrieval > sparse).to(tl.int8))


def route(pooled: torch.Tensor, weights: RouterWeights) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.head_routing.route``.

    Args:
        weights: contiguous.
    """
    rows, heads, width = pooled.shape
    inner = len(weights.features_in)
    classes = torch.empty(rows, heads, dtype=torch.int8, device=pooled.device)
    padded = power_of_two(width)
    _route[(rows * heads,)](
        pooled, *weights, classes, D=width, D_P=padded, WIDTH=inner, STEP=max(1, _NUMBERS // padded), num_warps=4,
        **options(pooled.device),
    )  # fmt: skip
    return classes
