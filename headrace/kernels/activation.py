"""Gated activations of an MLP whose gate and up projections are fused."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``: ``[..., 2n]`` (gate, then up) -> ``[..., n]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) * up`` with the tanh approximation: ``[..., 2n]`` (gate, then up) -> ``[..., n]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up
