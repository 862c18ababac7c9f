"""Mixture of experts: which experts a token goes to, and the product of every token with its experts' weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from headrace.kernels import gpu
from headrace.kernels.linear import linear
from headrace.kernels.moe import reference
from headrace.kernels.moe.codes import ExpertCodes
from headrace.model_spec import MoeSpec

if TYPE_CHECKING:
    from headrace.kernels.moe import cuda_router as router_kernel
    from headrace.kernels.moe import triton_router as router_kernels
else:
    router_kernel = gpu.Late(f"{__name__}.cuda_router")
    router_kernels = gpu.Late(f"{__name__}.triton_router")

MOST_ROUTED, MANY_ROUTED = 64, 1024
"""Tokens up to which a router's products are sums of single threads, and from which on they go through matrix units; between
the two a library's product is faster, whose weights are on their way sooner."""


def router_logits(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, batch_invariant: bool = False
) -> torch.Tensor:
    """``x W^T + bias`` in float32.

    Args:
        x: ``[T, hidden]``, last axis contiguous.
        weight: ``[num_experts, hidden]`` float32, contiguous.
        bias: ``[num_experts]`` float32.
        batch_invariant: as for ``kernels.linear.linear``.

    Returns:
        ``[T, num_experts]`` float32.
    """
    if not batch_invariant and gpu.takes(x) and x.stride(1) == 1:
        if len(x) <= MOST_ROUTED:
            return router_kernels.router_logits(x, weight, bias)
        if len(x) >= MANY_ROUTED and x.dtype == torch.bfloat16:
            return router_kernels.router_tiles(x, weight, bias)
    return linear(x.float(), weight, bias, batch_invariant=batch_invariant)


def choose_experts(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    correction: torch.Tensor | None,
    spec: MoeSpec,
    gate_up: Callable[[], torch.Tensor | ExpertCodes] | None = None,
    *,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """``route`` of ``router_logits``, whose arguments these are.

    Args:
        gate_up: returns what ``moe_mlp`` will multiply x by first; None: its rows are not x, or its experts others.

    Returns:
        Experts and weights, and for ``moe_mlp`` what a kernel has prepared of it.
    """
    if not batch_invariant and gpu.takes(x) and x.stride(1) == 1 and router_kernel.takes(x, weight, spec):
        return router_kernel.choose_experts(x, weight, bias, correction, spec, None if gate_up is None else gate_up())
    logits = router_logits(x, weight, bias, batch_invariant=batch_invariant)
    return *route(logits, spec, correction), None


route = gpu.dispatch(reference.route)
held_experts = gpu.dispatch(reference.held_experts)
moe_mlp = gpu.dispatch(reference.moe_mlp, "triton_experts")
