"""Gated activations of an MLP whose gate and up projections are fused."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``: ``[..., 2n]`` (gate, then up) -> ``[..., n]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) * up`` with the tanh approximation: ``[..., 2n]`` (gate, then up) -> ``[..., n]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) * up``: ``[..., 2n]`` (gate, then up) -> ``[..., n]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate) * up


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """``relu(x) ** 2``"""
    return F.relu(x).square()


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """``(clamp(up, -limit, limit) + 1) * g * sigmoid(alpha * g)`` with ``g = min(gate, limit)``, as gpt-oss has it.

    In float32, rounded once. ``[..., 2n]`` (gate, then up) -> ``[..., n]``.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(alpha * gate)).to(gate_up.dtype)


def sigmoid_gated(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """``x * sigmoid(gate)``, both ``[T, n]``. The sigmoid is rounded, and then the product."""
    return x * torch.sigmoid(gate)
