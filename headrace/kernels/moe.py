"""Mixture of experts: which experts a token goes to, and the product of every token with its experts' weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from headrace.errors import ConfigError
from headrace.kernels import gpu
from headrace.kernels.activation import clamped_swiglu, gelu_mul, gelu_tanh_mul, silu_mul
from headrace.kernels.linear import linear
from headrace.model_spec import CLAMPED_SWIGLU, MoeSpec

GATES = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", CLAMPED_SWIGLU)
"""Values of ``MoeSpec.act``."""

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

    Raises:
        ValueError: a tensor does not fit the others.
    """
    if weight.shape[1:] != x.shape[1:] or weight.dtype != torch.float32 or not weight.is_contiguous():
        raise ValueError(f"a router of {list(weight.shape)} {weight.dtype} does not fit x, {list(x.shape)}")
    if not invariant and len(x) <= MOST_ROUTED and gpu.takes(x) and x.stride(1) == 1:
        return gpu.kernels("router").router_logits(x, weight, bias)  # type: ignore[no-any-return]
    return linear(x.float(), weight, bias, invariant=invariant)


@gpu.dispatch("moe.route")
def route(
    logits: torch.Tensor, spec: MoeSpec, correction_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses each token's experts.

    Groups as in DeepSeek-V2 and V3 (2024): scores of experts outside the best groups do not count.

    Args:
        logits: ``[T, num_experts]`` float32.
        correction_bias: ``[num_experts]`` float32, for a spec that has it.

    Returns:
        Experts ``[T, top_k]`` int32, in no particular order, and their weights ``[T, top_k]`` float32.

    Raises:
        ValueError: a tensor does not fit the spec.
    """
    check_route(logits, spec, correction_bias)
    scores = logits.softmax(-1) if spec.scoring == "softmax" else logits.sigmoid()
    ranked = scores if correction_bias is None else scores + correction_bias
    if spec.top_groups < spec.num_groups:
        groups = ranked.view(len(ranked), spec.num_groups, spec.group_size)
        best = groups.amax(-1) if spec.group_score == "max" else groups.topk(2, dim=-1).values.sum(-1)
        left_out = torch.ones_like(best, dtype=torch.bool).scatter_(1, best.topk(spec.top_groups, dim=-1).indices, False)
        ranked = groups.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(1)
    experts = ranked.topk(spec.top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    if spec.normalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=spec.least_sum)
    return experts.int(), weights * spec.routed_scale


def check_route(logits: torch.Tensor, spec: MoeSpec, correction_bias: torch.Tensor | None) -> None:
    """Raises ValueError where a tensor does not fit the spec."""
    if logits.ndim != 2 or logits.shape[1] != spec.num_experts or logits.dtype != torch.float32:
        raise ValueError(f"logits must be [T, {spec.num_experts}] float32, not {list(logits.shape)} {logits.dtype}")
    if (correction_bias is not None) != spec.correction_bias:
        raise ValueError(f"correction_bias is {'missing' if spec.correction_bias else 'not supported by the spec'}")
    if correction_bias is not None and (correction_bias.shape != (spec.num_experts,) or correction_bias.dtype != torch.float32):
        raise ValueError(f"correction_bias must be [{spec.num_experts}] float32")


@gpu.dispatch("moe.held_experts")
def held_experts(experts: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Numbers the experts ``[start, stop)`` of one rank from 0 on; all others become the number behind the last."""
    own = experts - start
    return own.where((own >= 0) & (own < stop - start), stop - start)


def moe_mlp(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    spec: MoeSpec,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    plus: torch.Tensor | None = None,
    invariant: bool = False,
) -> torch.Tensor:
    """The weighted sum of each token's experts.

    Each product is rounded to x's dtype, as is each output times its weight; the sum of those is rounded once.

    Args:
        x: ``[T, hidden]``, last axis contiguous.
        experts: ``[T, top_k]`` int32; of a spec that holds some experts, as ``held_experts`` numbers them.
        weights: ``[T, top_k]`` float32.
        gate_up: ``[num_held, 2 * intermediate_size, hidden]`` of x's dtype, contiguous: an expert's gate, then its up.
        down: ``[num_held, hidden, intermediate_size]`` likewise.
        gate_up_bias: ``[num_held, 2 * intermediate_size]``
        down_bias: ``[num_held, hidden]``
        plus: ``[T, hidden]`` of x's dtype, contiguous: what is added to the rounded sum.
        invariant: a token comes out bitwise the same in any batch; on a GPU.

    Returns:
        ``[T, hidden]``

    Raises:
        ValueError: a tensor does not fit the others.
    """
    tokens, hidden = x.shape
    count, inner = spec.num_held, spec.intermediate_size
    expected: list[tuple[str, torch.Tensor | None, tuple[int, ...], torch.dtype]] = [
        ("experts", experts, (tokens, spec.top_k), torch.int32),
        ("weights", weights, (tokens, spec.top_k), torch.float32),
        ("gate_up", gate_up, (count, 2 * inner, hidden), x.dtype),
        ("down", down, (count, hidden, inner), x.dtype),
        ("gate_up_bias", gate_up_bias, (count, 2 * inner), x.dtype),
        ("down_bias", down_bias, (count, hidden), x.dtype),
        ("plus", plus, (tokens, hidden), x.dtype),
    ]
    for name, tensor, shape, dtype in expected:
        if tensor is not None and (tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous()):
            raise ValueError(f"{name} must be {list(shape)} {dtype} and contiguous, not {list(tensor.shape)} {tensor.dtype}")
    if tokens and x.stride(1) != 1:
        raise ValueError("the last axis of x must be contiguous")
    if gpu.takes(x):
        arguments = (x, experts, weights, gate_up, down, spec, gate_up_bias, down_bias)
        return gpu.kernels("moe").moe_mlp(*arguments, plus=plus, invariant=invariant)  # type: ignore[no-any-return]
    # Choices sorted by expert, then an expert at a time: experts without tokens cost nothing.
    flat = experts.flatten().long()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=spec.num_held).tolist()[: spec.num_held]
    shape = tokens * spec.top_k, x.shape[1]
    weighted = x.new_empty(shape) if spec.held is None else x.new_zeros(shape)
    factors = weights.flatten().unsqueeze(1)
    start = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        choices = order[start : start + count]
        start += count
        both = F.linear(x[choices // spec.top_k], gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert])
        out = F.linear(gated(both, spec), down[expert], None if down_bias is None else down_bias[expert])
        weighted[choices] = (out.float() * factors[choices]).to(x.dtype)
    total = weighted.view(tokens, spec.top_k, x.shape[1]).sum(1)
    return total if plus is None else total + plus


def gated(gate_up: torch.Tensor, spec: MoeSpec) -> torch.Tensor:
    """``[N, 2 * intermediate_size] -> [N, intermediate_size]``

    Raises:
        ConfigError: there is no such activation.
    """
    if spec.act == CLAMPED_SWIGLU:
        return clamped_swiglu(gate_up, spec.alpha, spec.limit)
    if spec.act in ("silu", "swish"):
        return silu_mul(gate_up)
    if spec.act == "gelu":
        return gelu_mul(gate_up)
    if spec.act in ("gelu_new", "gelu_pytorch_tanh"):
        return gelu_tanh_mul(gate_up)
    raise ConfigError(f"activation {spec.act!r} is not one of {', '.join(GATES)}", "hidden_act")
