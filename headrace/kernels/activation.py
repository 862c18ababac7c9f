"""Gated activations of an MLP whose gate and up projections are fused."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from headrace.kernels import gpu
from headrace.kernels.native.library import DTYPES, kernels_for


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``: ``[..., 2n]`` (gate, then up) -> ``[..., n]``."""
    if gpu.takes(gate_up):
        return gpu.kernels("activation").silu_mul(gate_up)  # type: ignore[no-any-return]
    native = kernels_for(gate_up)
    if native is None:
        return silu_mul_ref(gate_up)
    gate_up = gate_up.contiguous()
    n = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], n, dtype=gate_up.dtype)
    native.silu_mul(gate_up.data_ptr(), out.data_ptr(), out.numel() // max(n, 1), n, DTYPES[gate_up.dtype])
    return out


def silu_mul_ref(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


@gpu.dispatch("activation.gelu_tanh_mul")
def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) * up`` with the tanh approximation: ``[..., 2n]`` (gate, then up) -> ``[..., n]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) * up``: ``[..., 2n]`` (gate, then up) -> ``[..., n]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate) * up


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu_mul,
    "swish": silu_mul,
    "gelu": gelu_mul,
    "gelu_new": gelu_tanh_mul,
    "gelu_pytorch_tanh": gelu_tanh_mul,
}
"""Hugging Face's name -> ``act(gate) * up`` for ``[..., 2n] -> [..., n]``."""


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """``(clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g)`` with ``g = min(gate, limit)``, as gpt-oss has it.

    In float32, rounded once. ``[..., 2n]`` (gate, then up) -> ``[..., n]``.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(alpha * gate)).to(gate_up.dtype)
