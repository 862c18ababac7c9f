"""Gated activations by the native kernels."""

from __future__ import annotations

import torch

from headrace.kernels.native.library import DTYPES, NativeKernels


def silu_mul(native: NativeKernels, gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of a dtype that the library supports."""
    gate_up = gate_up.contiguous()
    n = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], n, dtype=gate_up.dtype)
    native.silu_mul(gate_up.data_ptr(), out.data_ptr(), out.numel() // max(n, 1), n, DTYPES[gate_up.dtype])
    return out
