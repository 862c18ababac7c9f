"""Mixture of experts: which experts a token goes to, and the product of every token with its experts' weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from headrace.kernels.activation import ACTIVATIONS, clamped_swiglu, squared_relu
from headrace.kernels.lora.reference import LowRank, Segment, expand, shrink
from headrace.kernels.moe.codes import ExpertCodes
from headrace.model_spec import CLAMPED_SWIGLU, MoeSpec

ExpertProduct = Callable[[int, torch.Tensor], torch.Tensor]
"""(expert, x ``[T, in]``) -> the product with the expert's matrix, ``[T, out]``, in x's dtype."""


@dataclasses.dataclass(frozen=True)
class ExpertFactors:
    """The matrices of adapters of a mixture's experts, which lie one behind the other."""

    gate_up: tuple[torch.Tensor, torch.Tensor]
    """A ``[places, experts * parts * rank, hidden]`` and B ``[places, experts * first_outputs, rank]``: an expert's gate, then
    its up; one part without gates."""
    down: tuple[torch.Tensor, torch.Tensor]
    """A ``[places, experts * rank, intermediate_size]`` and B ``[places, experts * hidden, rank]``"""
    segments: Sequence[Segment]
    places: torch.Tensor | None
    """Runs of tokens with one adapter, and their places: as ``LowRank`` has them."""


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
    """
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
        weights = weights / (weights.sum(-1, keepdim=True) + spec.added_sum).clamp(min=spec.least_sum)
    return experts.int(), weights * spec.routed_scale


def held_experts(experts: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Numbers the experts ``[start, stop)`` of one rank from 0 on; all others become the number behind the last."""
    own = experts - start
    return own.where((own >= 0) & (own < stop - start), stop - start)


def moe_mlp(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor | ExpertCodes,
    down: torch.Tensor | ExpertCodes,
    spec: MoeSpec,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    plus: torch.Tensor | None = None,
    adapters: ExpertFactors | None = None,
    prepared: Any = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """The weighted sum of each token's experts.

    Each product is rounded to x's dtype, as is each output times its weight; the sum of those is rounded once.

    Args:
        x: ``[T, hidden]``, last axis contiguous.
        experts: ``[T, top_k]`` int32; of a spec that holds some experts, as ``held_experts`` numbers them.
        weights: ``[T, top_k]`` float32.
        gate_up: ``[num_held, first_outputs, hidden]`` of x's dtype, contiguous, or codes: an expert's gate, then its up; of
            experts without gates the up.
        down: ``[num_held, hidden, intermediate_size]`` likewise.
        gate_up_bias: ``[num_held, first_outputs]``
        down_bias: ``[num_held, hidden]``
        plus: ``[T, hidden]`` of x's dtype, contiguous: what is added to the rounded sum.
        adapters: what they add joins the products before these are rounded, on a GPU, or after. Tokens without one stay bitwise
            the same.
        prepared: what ``choose_experts`` has done of the call with these arguments.
        batch_invariant: a token comes out bitwise the same in any batch; on a GPU.

    Returns:
        ``[T, hidden]``
    """
    both, out = partial(expert_product, gate_up, gate_up_bias), partial(expert_product, down, down_bias)
    return run_adapted(x, experts, weights, both, out, spec, plus, adapters)


def run_adapted(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: ExpertProduct,
    down: ExpertProduct,
    spec: MoeSpec,
    plus: torch.Tensor | None,
    adapters: ExpertFactors | None,
) -> torch.Tensor:
    """``run_experts``, and the tokens with adapters again, with what these add: an addition to gate and up goes through the
    activation. The others stay bitwise as they are."""
    total = run_experts(x, experts, weights, gate_up, down, spec, plus)
    if adapters is None:
        return total
    for start, end, place in adapters.segments:
        own = slice(start, end)
        first = _with_added(gate_up, adapters.gate_up, place, spec.num_held)
        second = _with_added(down, adapters.down, place, spec.num_held)
        rest = None if plus is None else plus[own]
        total[own] = run_experts(x[own], experts[own], weights[own], first, second, spec, rest)
    return total


def _with_added(product: ExpertProduct, factors: tuple[torch.Tensor, torch.Tensor], place: int, count: int) -> ExpertProduct:
    """``product`` with what the adapter in a place adds to each of ``count`` experts."""
    a, b = (matrix[place].view(count, -1, matrix.shape[2]) for matrix in factors)
    parts = a.shape[1] // b.shape[2]
    ends = [b.shape[1] // parts * (part + 1) for part in range(parts)]

    def added(expert: int, x: torch.Tensor) -> torch.Tensor:
        y, every = product(expert, x), (Segment(0, len(x), 0),)
        expand(LowRank(shrink(x, a[None, expert], every), b[None, expert], ends, every, None), y)
        return y

    return added


def run_experts(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: ExpertProduct,
    down: ExpertProduct,
    spec: MoeSpec,
    plus: torch.Tensor | None,
) -> torch.Tensor:
    """``moe_mlp`` with any products."""
    # Choices sorted by expert, then an expert at a time: experts without tokens cost nothing.
    flat = experts.flatten().long()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=spec.num_held).tolist()[: spec.num_held]
    shape = len(x) * spec.top_k, x.shape[1]
    weighted = x.new_empty(shape) if spec.held is None else x.new_zeros(shape)
    factors = weights.flatten().unsqueeze(1)
    start = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        choices = order[start : start + count]
        start += count
        out = down(expert, gated(gate_up(expert, x[choices // spec.top_k]), spec))
        weighted[choices] = (out.float() * factors[choices]).to(x.dtype)
    total = weighted.view(len(x), spec.top_k, x.shape[1]).sum(1)
    return total if plus is None else total + plus


def expert_product(weight: torch.Tensor | ExpertCodes, bias: torch.Tensor | None, expert: int, x: torch.Tensor) -> torch.Tensor:
    """``x W^T + b`` of one expert, rounded to x's dtype."""
    own = None if bias is None else bias[expert]
    if isinstance(weight, torch.Tensor):
        return F.linear(x, weight[expert], own)
    rounded = F.linear(weight.round_rows(x), weight.dequantize(expert), None if own is None else own.float())
    return rounded.to(x.dtype)


def gated(gate_up: torch.Tensor, spec: MoeSpec) -> torch.Tensor:
    """``[N, first_outputs] -> [N, intermediate_size]``"""
    if not spec.gated:
        return squared_relu(gate_up)
    if spec.act == CLAMPED_SWIGLU:
        return clamped_swiglu(gate_up, spec.alpha, spec.limit)
    return ACTIVATIONS[spec.act](gate_up)
