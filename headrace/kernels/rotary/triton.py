"""Rotation of whole heads in place. Reference: ``headrace.kernels.rotary.reference``."""

from __future__ import annotations

import torch
import triton.language as tl

from headrace.kernels.support import power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import begin, options


@launched
def _rotate(
    x, cos, sin, token_stride: tl.int64, angle_stride: tl.int64, HEADS: tl.constexpr, HALF: tl.constexpr, HEADS_P: tl.constexpr,
    HALF_P: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """All heads of a token."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    head, channel = tl.arange(0, HEADS_P)[:, None], tl.arange(0, HALF_P)[None, :]
    mask = (head < HEADS) & (channel < HALF)
    place = x + token * token_stride + head * (2 * HALF) + channel
    first = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=mask, other=0.0).to(tl.float32)
    angle = token * angle_stride + channel
    c = tl.load(cos + angle, mask=channel < HALF, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=channel < HALF, other=0.0).to(tl.float32)
    tl.store(place, (first * c - second * s).to(x.dtype.element_ty), mask=mask)
    tl.store(place + HALF, (second * c + first * s).to(x.dtype.element_ty), mask=mask)


def rotate_heads(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotates ``[T, heads, d]``, of which only tokens may lie apart, in place; ``cos`` and ``sin``: ``[T, d / 2]`` or wider."""
    tokens, heads, width = x.shape
    if width % 2 or x.stride(2) != 1 or x.stride(1) != width or cos.stride() != sin.stride() or cos.stride(1) != 1:
        raise ValueError(f"heads of {list(x.shape)} with strides {x.stride()} cannot be rotated in place")
    if tokens:
        _rotate[(tokens,)](
            x, cos, sin, x.stride(0), cos.stride(0), HEADS=heads, HALF=width // 2, HEADS_P=power_of_two(heads),
            HALF_P=power_of_two(width // 2), num_warps=4, **options(x.device),
        )  # fmt: skip
