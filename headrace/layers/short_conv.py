"""ShortConv: a gated short convolution in place of attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from headrace.attention.context import ForwardContext
from headrace.kernels.state import gated_conv
from headrace.layers.linear import Linear, RowParallelLinear
from headrace.model_spec import ModelSpec, StateSpec


class CausalConv(nn.Module):
    """The weights of a causal depthwise convolution, as ``nn.Conv1d`` stores them."""

    def __init__(self, channels: int, width: int, *, bias: bool, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width, dtype=dtype, device=device), requires_grad=False)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(channels, dtype=dtype, device=device), requires_grad=False)
        self.batch_invariant = False
        """Each token's result is bitwise independent of other sequences, as it is in any case."""


class StateMixer(nn.Module):
    """A mixer that carries a state from token to token, between its projections. Tensor-parallel ranks hold parts of it."""

    outputs: ClassVar[Mapping[str, tuple[str, ...]]]
    """Attribute -> the channels that its outputs, or entries, are of, one behind the other: ``values``, ``keys`` or ``heads``.
    Attributes that are not named here, or None, are held whole, but for ``out_proj``, which reads the values."""
    spec: StateSpec
    out_proj: RowParallelLinear


class ShortConv(StateMixer):
    """``out_proj(C * conv(B * x))``, where B, C and x are projections of the input. The state is the last ``B * x``."""

    outputs: ClassVar = {"in_proj": ("values",) * 3, "conv": ("values",)}

    def __init__(self, model: ModelSpec, spec: StateSpec, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        if spec.conv is None:
            raise ValueError(f"state layer {spec.index} has no convolution")
        self.spec, channels, bias = spec, spec.conv.channels, spec.conv.bias
        self.in_proj = Linear(model.hidden_size, 3 * channels, bias=bias, dtype=dtype, device=device)
        self.conv = CausalConv(channels, spec.conv.width, bias=bias, dtype=dtype, device=device)
        self.out_proj = RowParallelLinear(channels, model.hidden_size, bias=bias, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor, cos_sin: torch.Tensor | None, ctx: ForwardContext) -> torch.Tensor:
        """``[T, hidden] -> [T, hidden]``"""
        rows, own = ctx.state_of(self.spec.index)
        if own.conv is None:
            raise ValueError(f"state layer {self.spec.index} has no place for its inputs")
        mixed = gated_conv(self.in_proj(x), self.conv.weight[:, 0], self.conv.bias, own.conv, rows)
        return self.out_proj(mixed)  # type: ignore[no-any-return]

    def readers(self) -> tuple[Linear, ...]:
        """The layers that multiply the input, which nothing else reads."""
        return (self.in_proj,)
