"""Gated activations. References: ``headrace.kernels.activation.reference``."""

# A kernel's tuples grow.
# mypy: disable-error-code=assignment

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.kv_cache.triton_fp8 import as_bytes, mode, quantized, scale_of_peak, size_bits
from headrace.kernels.linear.fp8_reference import Fp8Rows
from headrace.kernels.linear.triton_fp8 import block_of, empty_rows, store_rounded
from headrace.kernels.support import cdiv, power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import begin, options

_BLOCK = 1024
_ROW_BLOCK = 4096
"""Channels of a row that a program takes at a time, where the whole row has one scale."""


@triton.jit
def sigmoid(x, MODE: tl.constexpr):
    """Within two units in float32's last place; 0 below -87, where the quotient would be subnormal."""
    if MODE == 1:
        # What the compiler makes of the quotient takes three times as many instructions, for subnormal numbers and overflow.
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; mul.ftz.f32 t, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 t, t; add.ftz.f32 t, t, 0f3F800000; "
            "rcp.approx.ftz.f32 $0, t; }",
            "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return tl.sigmoid(x)


@triton.jit
def gated_product(gate, up, GELU: tl.constexpr, MODE: tl.constexpr):
    """The activation is rounded, and then its product with up."""
    wide = gate.to(tl.float32)
    if GELU:
        # 0.5 x (1 + tanh u) is x sigmoid(2 u), which loses no digits where u is far below 0.
        bent = 0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)
        activated = wide * sigmoid(2.0 * bent, MODE)
    else:
        activated = wide * sigmoid(wide, MODE)
    return (activated.to(gate.dtype).to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


@launched
def _gated(
    gate_up, out, scales, token_stride: tl.int64, scale_column: tl.int64, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    GELU: tl.constexpr, GROUP: tl.constexpr, MODE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A block of one token's channels. With GROUP, ``out`` has their e4m3 codes, and ``scales`` one for each ``GROUP``."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    channel = first + tl.arange(0, BLOCK)
    mask = channel < WIDTH
    gate = tl.load(gate_up + token * token_stride + channel, mask=mask, other=0.0)
    up = tl.load(gate_up + token * token_stride + WIDTH + channel, mask=mask, other=0.0)
    product = gated_product(gate, up, GELU, MODE)
    if GROUP:
        store_rounded(product, out, scales, scale_column, token, first, WIDTH, BLOCK, GROUP, MODE)
    else:
        tl.store(out + token * WIDTH + channel, product, mask=mask)


@launched
def _gated_row(
    gate_up, codes, scales, token_stride: tl.int64, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr,
    MODE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One token, rounded with one scale: its products stay in registers until the scale is known."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    gates, ups, products = (), (), ()
    peak = tl.zeros([BLOCK], tl.int32)
    for first in tl.static_range(0, WIDTH, BLOCK):
        mask = channel < WIDTH - first
        gates += (tl.load(gate_up + token * token_stride + first + channel, mask=mask, other=0.0),)
        ups += (tl.load(gate_up + token * token_stride + WIDTH + first + channel, mask=mask, other=0.0),)
    # The compiler would load the second half once the first is activated: no load moves behind a barrier.
    tl.debug_barrier()
    for first in tl.static_range(0, WIDTH, BLOCK):
        products += (gated_product(gates[first // BLOCK], ups[first // BLOCK], GELU, MODE),)
        peak = tl.maximum(peak, size_bits(products[first // BLOCK].to(tl.float32)))
    scale = scale_of_peak(tl.max(peak, 0).to(tl.float32, bitcast=True))
    tl.store(scales + token, scale)
    for first in tl.static_range(0, WIDTH, BLOCK):
        stored = quantized(products[first // BLOCK].to(tl.float32), scale, MODE)
        tl.store(codes + token * WIDTH + first + channel, stored, mask=channel < WIDTH - first)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.activation.silu_mul``; the leading axes must collapse into one."""
    return _launch(gate_up, gelu=False)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.activation.gelu_tanh_mul``; the leading axes must collapse into one."""
    return _launch(gate_up, gelu=True)


def rounded_gated(gate_up: torch.Tensor, group: int, *, gelu: bool) -> Fp8Rows:
    """``gelu_tanh_mul`` or ``silu_mul`` of ``[T, 2n]``, rounded to e4m3 with a scale for each ``group`` channels: n, or a power
    of two that divides it."""
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    codes, scales = empty_rows(tokens, width, group, gate_up.device)
    if tokens and group < width:
        _run(gate_up, codes, scales, block_of(width, group), gelu=gelu)
    elif tokens:
        block = min(_ROW_BLOCK, power_of_two(width))
        _gated_row[(tokens,)](
            gate_up, as_bytes(codes), scales, gate_up.stride(0), WIDTH=width, BLOCK=block, GELU=gelu, MODE=mode(codes.device),
            num_warps=max(block // 256, 1), **options(codes.device),
        )  # fmt: skip
    return Fp8Rows(codes, scales, tokens, gate_up.dtype)


def _launch(gate_up: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    width = rows.shape[1] // 2
    if rows.shape[1] % 2 or rows.stride(1) != 1:
        raise ValueError(f"gate and up must be [..., 2n] with a contiguous last axis, not {list(gate_up.shape)}")
    out = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        _run(rows, out, None, min(_BLOCK, power_of_two(width)), gelu=gelu)
    return out


def _run(rows: torch.Tensor, out: torch.Tensor, scales: torch.Tensor | None, block: int, *, gelu: bool) -> None:
    tokens, width = rows.shape[0], rows.shape[1] // 2
    _gated[(tokens, cdiv(width, block))](
        rows, out if scales is None else as_bytes(out), out if scales is None else scales, rows.stride(0),
        0 if scales is None else scales.stride(1), WIDTH=width, BLOCK=block, GELU=gelu,
        GROUP=0 if scales is None else width // scales.shape[1], MODE=mode(rows.device),
        num_warps=min(max(block // 256, 1), 16), **options(rows.device),
    )  # fmt: skip


@launched
def _opened(x, gate, out, x_row: tl.int64, gate_row: tl.int64, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """A block of one token's channels."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < WIDTH
    factor = tl.sigmoid(tl.load(gate + token * gate_row + channel, mask=mask, other=0.0).to(tl.float32))
    value = tl.load(x + token * x_row + channel, mask=mask, other=0.0)
    value = value.to(tl.float32) * factor.to(value.dtype).to(tl.float32)
    tl.store(out + token * WIDTH + channel, value.to(out.dtype.element_ty), mask=mask)


def sigmoid_gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.activation.sigmoid_gated``."""
    tokens, width = x.shape
    out = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    if tokens:
        block = min(_BLOCK, power_of_two(width))
        x, gate = (each if each.stride(1) == 1 else each.contiguous() for each in (x, gate))
        _opened[(tokens, cdiv(width, block))](
            x, gate, out, x.stride(0), gate.stride(0), WIDTH=width, BLOCK=block, num_warps=4, **options(x.device)
        )
    return out
