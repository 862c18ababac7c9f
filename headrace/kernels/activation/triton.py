"""Gated activations. References: ``headrace.kernels.activation.reference``."""

# A kernel's arguments have no types of Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.triton_pdl import begin, options

_BLOCK = 1024


@triton.jit
def _gated(
    gate_up, out, token_stride: tl.int64, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr
):
    """A block of one token's channels."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < WIDTH
    gate = tl.load(gate_up + token * token_stride + channel, mask=mask, other=0.0)
    up = tl.load(gate_up + token * token_stride + WIDTH + channel, mask=mask, other=0.0)
    wide = gate.to(tl.float32)
    if GELU:
        # 0.5 x (1 + tanh u) is x sigmoid(2 u), which loses no digits where u is far below 0.
        bent = 0.7978845608028654 * (wide + 0.044715 * wide * wide * wide)
        activated = wide * tl.sigmoid(2.0 * bent)
    else:
        activated = wide * tl.sigmoid(wide)
    product = activated.to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out + token * WIDTH + channel, product.to(gate.dtype), mask=mask)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.activation.silu_mul``; the leading axes must collapse into one."""
    return _launch(gate_up, gelu=False)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.activation.gelu_tanh_mul``; the leading axes must collapse into one."""
    return _launch(gate_up, gelu=True)


def _launch(gate_up: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    rows = gate_up.reshape(-1, gate_up.shape[-1])
    tokens, width = rows.shape[0], rows.shape[1] // 2
    if rows.shape[1] % 2 or rows.stride(1) != 1:
        raise ValueError(f"gate and up must be [..., 2n] with a contiguous last axis, not {list(gate_up.shape)}")
    out = torch.empty(*gate_up.shape[:-1], width, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        block = min(_BLOCK, triton.next_power_of_2(width))
        _gated[(tokens, triton.cdiv(width, block))](
            rows,
            out,
            rows.stride(0),
            WIDTH=width,
            BLOCK=block,
            GELU=gelu,
            num_warps=max(block // 256, 1),
            **options(gate_up.device),
        )
    return out
