"""Conversion to and from e4m3 inside kernels.

``MODE`` is 0 for no FP8 at all, ``NATIVE`` where the device converts, ``BITS`` where only integers can (before SM89).
A number read in mode ``BITS`` comes out 256 times too small; callers put ``gain(MODE)`` into a factor they have anyway.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.support import NATIVE_FP8_SM, compute_capability, interpreted

OFF, NATIVE, BITS = 0, 1, 2


def mode(device: torch.device) -> int:
    """The conversion mode of a device."""
    capability = compute_capability(device)
    return NATIVE if capability is not None and capability >= NATIVE_FP8_SM and not interpreted() else BITS


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """An e4m3 tensor as bytes, since not every device supports the type in kernels."""
    return cache.view(torch.uint8)


@triton.jit
def gain(MODE: tl.constexpr):
    """Returns the factor by which numbers from ``to_half`` must be multiplied."""
    return 256.0 if MODE == 2 else 1.0


@triton.jit
def to_half(stored, MODE: tl.constexpr):
    """uint8 that hold e4m3 -> float16, divided by ``gain``. Exact, subnormal numbers included."""
    if MODE == 1:
        return stored.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        # Exponent and mantissa move to float16's place as they are; the exponents' biases differ by 8. NaN is never stored.
        bits = stored.to(tl.uint16)
        return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def from_float(x, MODE: tl.constexpr):
    """float32 of at most 448 in absolute value, or NaN -> uint8 that hold e4m3, rounded to nearest, ties to even."""
    if MODE == 1:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # 20 of float32's 23 mantissa bits go; the exponent's bias falls from 127 to 7.
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        # Below 2 ** -6 numbers are multiples of 2 ** -9: adding 2 ** 23 rounds to integers, which are the encoding.
        shifted = size.to(tl.float32, bitcast=True) * 512.0 + 8388608.0
        small = shifted.to(tl.uint32, bitcast=True) - 0x4B000000
        stored = tl.where(size < 0x3C800000, small, normal)
        stored = tl.where(size > 0x7F800000, 0x7F, stored)
        return (stored | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def scale_of(x, AXIS: tl.constexpr):
    """``max(absmax / 448, 1e-12)`` of float32 along an axis; NaN if there is one."""
    return scale_of_peak(tl.max(size_bits(x), AXIS).to(tl.float32, bitcast=True))


@triton.jit
def size_bits(x):
    """Bits of the absolute values of float32. Their maximum is that of the values, and NaN if there is one, above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of_peak(peak):
    """The scale for numbers whose largest absolute value is ``peak``."""
    scale = tl.div_rn(peak, 448.0)
    return tl.where(scale < 1e-12, 1e-12, scale)


@triton.jit
def quantized(x, scale, MODE: tl.constexpr):
    """``x / scale`` as uint8 that hold e4m3, saturated; 0 for NaN. The shape of ``scale`` broadcasts to that of x."""
    if MODE == 1:
        # A correction of the product with the inverse gives the quotient, in three instructions. Products with -1 keep the sign
        # of zero, which Triton's minus loses. The conversion saturates.
        inverse = tl.div_rn(1.0, scale)
        ratio = x * inverse
        ratio = tl.fma(tl.fma(ratio, scale, x * -1.0), inverse * -1.0, ratio)
    else:
        ratio = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
        ratio = tl.where(ratio > 448.0, 448.0, tl.where(ratio < -448.0, -448.0, ratio))
    return from_float(tl.where(ratio != ratio, 0.0, ratio), MODE)
