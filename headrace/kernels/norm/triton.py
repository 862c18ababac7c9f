"""RMS normalisation, alone and with the residual sum before it. References: ``headrace.kernels.norm.reference``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.kv_cache.triton_fp8 import as_bytes, mode
from headrace.kernels.linear.fp8_reference import Fp8Rows
from headrace.kernels.linear.triton_fp8 import empty_rows, store_rounded
from headrace.kernels.support import power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import announce, options, wait


@triton.jit
def scaled(value, rms, factor, OFFSET: tl.constexpr):
    """Multiplies by both factors, of which ``rms`` is float32: rounded after each or, with OFFSET, once."""
    wide = value.to(tl.float32) * rms
    if OFFSET:
        return (wide * (1.0 + factor.to(tl.float32))).to(value.dtype)
    return (wide.to(value.dtype).to(tl.float32) * factor.to(tl.float32)).to(value.dtype)


@triton.jit
def normed(value, factor, eps, WIDTH: tl.constexpr, OFFSET: tl.constexpr):
    """The norm of one row of ``WIDTH`` channels by their factors, which are loaded before: the sum takes a while."""
    wide = value.to(tl.float32)
    return scaled(value, tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps), factor, OFFSET)


@launched(do_not_specialize=["inner"])
def _rms_norm(
    x, residual, first, weight, out, scales, total, first_eps, eps, inner, x_outer: tl.int64, x_inner: tl.int64,
    residual_outer: tl.int64, residual_inner: tl.int64, scale_column: tl.int64, WIDTH: tl.constexpr, WIDTH_P: tl.constexpr,
    FIRST: tl.constexpr, ADD: tl.constexpr, OFFSET: tl.constexpr, GROUP: tl.constexpr, MODE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One row of ``WIDTH`` channels; row r of x begins at ``(r // inner) * x_outer + (r % inner) * x_inner``.

    With FIRST, x is normed by the weight ``first`` before it is added. With GROUP, ``out`` has e4m3 codes of the norm, and
    ``scales`` one for each ``GROUP`` channels.
    """
    announce(PDL)
    row = tl.program_id(0)
    channel = tl.arange(0, WIDTH_P)
    mask = channel < WIDTH
    # A step reads these once, so that they come from the memory.
    factor = tl.load(weight + channel, mask=mask, other=0.0)
    if FIRST:
        first_factor = tl.load(first + channel, mask=mask, other=0.0)
    wait(PDL)
    place = row.to(tl.int64) * WIDTH + channel
    outer, within = row // inner, row % inner
    value = tl.load(x + outer * x_outer + within * x_inner + channel, mask=mask, other=0.0)
    if FIRST:
        value = normed(value, first_factor, first_eps, WIDTH, OFFSET)
    if ADD:
        added = tl.load(residual + outer * residual_outer + within * residual_inner + channel, mask=mask, other=0.0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
        tl.store(total + place, value, mask=mask)
    result = normed(value, factor, eps, WIDTH, OFFSET)
    if GROUP:
        store_rounded(result, out, scales, scale_column, row.to(tl.int64), 0, WIDTH, WIDTH_P, GROUP, MODE)
    else:
        tl.store(out + place, result, mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: bool = False) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.norm.rms_norm``.

    ``x`` is ``[T, n]`` or ``[T, heads, n]`` of any strides with a contiguous last axis.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, out, None, out, eps, None, offset)
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    first: tuple[torch.Tensor, float] | None = None,
    offset: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Kernel version of ``headrace.kernels.norm.add_rms_norm``; strides as in ``rms_norm``.

    ``first``: weight and eps of x's own norm, as in ``norm_add_rms_norm``.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, out, None, total, eps, first, offset)
    return out, total


def rounded_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    group: int,
    *,
    first: tuple[torch.Tensor, float] | None = None,
    offset: bool = False,
) -> tuple[Fp8Rows, torch.Tensor]:
    """``rms_norm`` of ``[T, n]``, or with a residual ``add_rms_norm``, with the norm rounded to e4m3.

    Args:
        group: channels that share a scale: n, or a power of two that divides it.

    Returns:
        the norm; the sum, or x.
    """
    rows, width = x.shape
    codes, scales = empty_rows(rows, width, group, x.device)
    total = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, codes, scales, total, eps, first, offset)
    return Fp8Rows(codes, scales, rows, x.dtype), total


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    scales: torch.Tensor | None,
    total: torch.Tensor,
    eps: float,
    first: tuple[torch.Tensor, float] | None,
    offset: bool,
) -> None:
    width = x.shape[-1]
    first_weight, first_eps = first or (weight, 0.0)
    for each in (weight, first_weight):
        _check_weight(each, x)
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"the residual must be {list(x.shape)} {x.dtype}, as x is, not {list(residual.shape)} {residual.dtype}"
        )
    if not x.numel():
        return
    width_p = power_of_two(width)
    # Eight channels a thread: 16 bytes of a 16-bit type, the widest load there is.
    warps = min(max(width_p // 256, 1), 16)
    _rms_norm[(x.numel() // width,)](
        x, x if residual is None else residual, first_weight, weight, out if scales is None else as_bytes(out),
        out if scales is None else scales, total, first_eps, eps, x.shape[1] if x.ndim == 3 else 1, *_row_strides(x),
        *_row_strides(x if residual is None else residual), 0 if scales is None else scales.stride(1), WIDTH=width,
        WIDTH_P=width_p, FIRST=first is not None, ADD=residual is not None, OFFSET=offset,
        GROUP=0 if scales is None else width // scales.shape[1], MODE=mode(x.device), num_warps=warps, **options(x.device),
    )  # fmt: skip


def _check_weight(weight: torch.Tensor, x: torch.Tensor) -> None:
    if weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
        raise ValueError(f"the weight must be [{x.shape[-1]}] {x.dtype}, not {list(weight.shape)} {weight.dtype}")


def _row_strides(x: torch.Tensor) -> tuple[int, int]:
    """Strides from one token to the next, and from one head to the next."""
    if x.ndim not in (2, 3) or x.stride(-1) != 1:
        raise ValueError(f"rows must be [T, n] or [T, heads, n] with a contiguous last axis, not {list(x.shape)} {x.stride()}")
    return x.stride(0), x.stride(1) if x.ndim == 3 else 0
