"""The gated MLP of the Llama lineage, with gate and up projections fused."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from headrace.errors import ConfigError
from headrace.kernels.activation import gelu_mul, gelu_tanh_mul, silu_mul
from headrace.layers.linear import FusedLinear, RowParallelLinear
from headrace.model_spec import DenseSpec

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu_mul,
    "swish": silu_mul,
    "gelu": gelu_mul,
    "gelu_new": gelu_tanh_mul,
    "gelu_pytorch_tanh": gelu_tanh_mul,
}
"""Hugging Face's name -> ``act(gate) * up`` for ``[T, 2n] -> [T, n]``."""


class GatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))``; a tensor-parallel rank gives its part of the sum over ranks."""

    def __init__(self, hidden_size: int, spec: DenseSpec, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.spec = spec
        if spec.act not in ACTIVATIONS:
            raise ConfigError(f"hidden_act {spec.act!r} is not one of {', '.join(ACTIVATIONS)}", "hidden_act")
        parts = {"gate_proj": spec.intermediate_size, "up_proj": spec.intermediate_size}
        self.gate_up_proj = FusedLinear(hidden_size, parts, bias=spec.bias, dtype=dtype, device=device)
        self.down_proj = RowParallelLinear(spec.intermediate_size, hidden_size, bias=spec.bias, dtype=dtype, device=device)
        self.act_mul = ACTIVATIONS[spec.act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, hidden] -> [T, hidden]``"""
        out: torch.Tensor = self.down_proj(self.act_mul(self.gate_up_proj(x)))
        return out
