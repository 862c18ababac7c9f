"""Mixture of experts: which experts a token goes to, and the product of every token with its experts' weights."""

from __future__ import annotations

import torch

from headrace.kernels import gpu
from headrace.kernels.linear import linear
from headrace.kernels.moe import reference

MOST_ROUTED = 64
"""Tokens up to which the router kernel is used; more take a library's product."""


def router_logits(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, invariant: bool = False
) -> torch.Tensor:
    """``x W^T + bias`` in float32.

    Args:
        x: ``[T, hidden]``, last axis contiguous.
        weight: ``[num_experts, hidden]`` float32, contiguous.
        bias: ``[num_experts]`` float32.
        invariant: as for ``kernels.linear.linear``.

    Returns:
        ``[T, num_experts]`` float32.
    """
    if not invariant and len(x) <= MOST_ROUTED and gpu.takes(x) and x.stride(1) == 1:
        return gpu.kernels("moe.triton_router").router_logits(x, weight, bias)  # type: ignore[no-any-return]
    return linear(x.float(), weight, bias, invariant=invariant)


route = gpu.dispatch(reference.route, "moe.triton")
held_experts = gpu.dispatch(reference.held_experts, "moe.triton")
moe_mlp = gpu.dispatch(reference.moe_mlp, "moe.triton")
