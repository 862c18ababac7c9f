"""Gated activations by the native kernels."""

from __future__ import annotations

import torch

from headrace.kernels.native.library import DTYPES, kernels_for


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor | None:
    """``silu(gate) * up``; None: the library is not there, or does not support the dtype."""
    if (native := kernels_for(gate_up)) is None:
        return None
    gate_up = gate_up.contiguous()
    n = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], n, dtype=gate_up.dtype)
    native.silu_mul(gate_up.data_ptr(), out.data_ptr(), out.numel() // max(n, 1), n, DTYPES[gate_up.dtype])
    return out
