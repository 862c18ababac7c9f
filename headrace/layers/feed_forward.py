"""The module that a layer has after its attention."""

from __future__ import annotations

import torch
from torch import nn

from headrace.layers.mlp import GatedMLP
from headrace.layers.moe import MoeMLP
from headrace.spec import MlpSpec, MoeSpec


def feed_forward(hidden_size: int, spec: MlpSpec, *, dtype: torch.dtype, device: str | torch.device) -> nn.Module:
    """``[T, hidden] -> [T, hidden]``, as the spec says."""
    if isinstance(spec, MoeSpec):
        return MoeMLP(hidden_size, spec, dtype=dtype, device=device)
    return GatedMLP(hidden_size, spec, dtype=dtype, device=device)
