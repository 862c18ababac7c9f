"""MLPs: the gated one of the Llama lineage, with gate and up projections fused, and one without a gate."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from headrace.kernels.activation import ACTIVATIONS, activate, clamped_swiglu, silu_mul, squared_relu
from headrace.kernels.linear.fp8_reference import Activations
from headrace.layers.linear import FusedLinear, Linear, RowParallelLinear
from headrace.model_spec import CLAMPED_SWIGLU, DenseSpec


class GatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))``; a tensor-parallel rank gives its part of the sum over ranks."""

    def __init__(self, hidden_size: int, spec: DenseSpec, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.spec = spec
        parts = {"gate_proj": spec.intermediate_size, "up_proj": spec.intermediate_size}
        self.gate_up_proj = FusedLinear(hidden_size, parts, bias=spec.bias, dtype=dtype, device=device)
        self.down_proj = RowParallelLinear(spec.intermediate_size, hidden_size, bias=spec.bias, dtype=dtype, device=device)
        clamped = partial(clamped_swiglu, alpha=spec.alpha, limit=spec.limit)
        self.act_mul = clamped if spec.act == CLAMPED_SWIGLU else ACTIVATIONS[spec.act]

    def forward(self, x: Activations) -> torch.Tensor:
        """``[T, hidden] -> [T, hidden]``"""
        gated: Activations | None = self.gate_up_proj.gated(x) if self.act_mul is silu_mul else None
        if gated is None:
            gated = activate(self.act_mul, self.gate_up_proj(x), self.down_proj.rounds)
        out: torch.Tensor = self.down_proj(gated)
        return out

    def readers(self) -> tuple[Linear, ...]:
        """The layers that multiply the input, which nothing else reads."""
        return (self.gate_up_proj,)


class SquaredMLP(nn.Module):
    """``down(relu(up(x)) ** 2)``; a tensor-parallel rank gives its part of the sum over ranks."""

    def __init__(self, hidden_size: int, spec: DenseSpec, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.up_proj = Linear(hidden_size, spec.intermediate_size, bias=spec.bias, dtype=dtype, device=device)
        self.down_proj = RowParallelLinear(spec.intermediate_size, hidden_size, bias=spec.bias, dtype=dtype, device=device)

    def forward(self, x: Activations) -> torch.Tensor:
        """``[T, hidden] -> [T, hidden]``"""
        return self.down_proj(squared_relu(self.up_proj(x)))  # type: ignore[no-any-return]

    def readers(self) -> tuple[Linear, ...]:
        """The layers that multiply the input, which nothing else reads."""
        return (self.up_proj,)


def build_mlp(hidden_size: int, spec: DenseSpec, dtype: torch.dtype, device: str | torch.device) -> GatedMLP | SquaredMLP:
    """Builds the MLP that ``spec`` describes."""
    kind = GatedMLP if spec.gated else SquaredMLP
    return kind(hidden_size, spec, dtype=dtype, device=device)
