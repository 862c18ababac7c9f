"""The gated MLP of the Llama lineage, with gate and up projections fused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn.functional import gelu

from headrace.errors import ConfigError
from headrace.kernels.activation import gelu_tanh_mul, silu_mul
from headrace.layers.linear import Linear


def _gelu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate) * up


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu_mul,
    "swish": silu_mul,
    "gelu": _gelu_mul,
    "gelu_new": gelu_tanh_mul,
    "gelu_pytorch_tanh": gelu_tanh_mul,
}
"""Hugging Face's name -> ``act(gate) * up`` for ``[T, 2n] -> [T, n]``."""


class GatedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))``"""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        hidden_act: str,
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: str | torch.device,
    ) -> None:
        super().__init__()
        if hidden_act not in ACTIVATIONS:
            raise ConfigError(f"hidden_act {hidden_act!r} is not one of {', '.join(ACTIVATIONS)}", "hidden_act")
        linear = partial(Linear, bias=bias, dtype=dtype, device=device)
        self.gate_up_proj = linear(hidden_size, 2 * intermediate_size)
        self.down_proj = linear(intermediate_size, hidden_size)
        self.act_mul = ACTIVATIONS[hidden_act]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[T, hidden] -> [T, hidden]``"""
        out: torch.Tensor = self.down_proj(self.act_mul(self.gate_up_proj(x)))
        return out
