"""Choice of experts. References: ``headrace.kernels.moe.reference``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.support import cdiv, power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import begin, options
from headrace.model_spec import MoeSpec

_BLOCK = 1024
"""Choices of a program that numbers them."""


@triton.jit
def _best(values, index, COUNT: tl.constexpr):
    """The largest of ``values`` and its index, the first of equals; always an index below COUNT, if there are NaNs too."""
    top = tl.max(tl.max(values, 1), 0)
    place = tl.min(tl.min(tl.where(values == top, index, COUNT - 1), 1), 0)
    return top, place


@launched
def _route(
    logits, correction, experts, weights, logits_row: tl.int64, scale, least_sum, added_sum, TOP_K: tl.constexpr,
    TOP_K_P: tl.constexpr, EXPERTS: tl.constexpr, GROUPS: tl.constexpr, GROUPS_P: tl.constexpr, SIZE: tl.constexpr,
    SIZE_P: tl.constexpr, TOP_GROUPS: tl.constexpr, BEST_TWO: tl.constexpr, SIGMOID: tl.constexpr, CORRECTION: tl.constexpr,
    NORMALIZE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One token. Experts lie in a plane: a row a group."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS_P)
    member = tl.arange(0, SIZE_P)
    index = group[:, None] * SIZE + member[None, :]
    present = (group < GROUPS)[:, None] & (member < SIZE)[None, :]
    logit = tl.load(logits + token * logits_row + index, mask=present, other=float("-inf"))
    if SIGMOID:
        scores = tl.sigmoid(logit)
    else:
        shares = tl.exp(logit - tl.max(tl.max(logit, 1), 0))
        scores = shares / tl.sum(tl.sum(shares, 1), 0)
    ranked = scores
    if CORRECTION:
        ranked += tl.load(correction + index, mask=present, other=0.0)
    ranked = tl.where(present & (ranked == ranked), ranked, float("-inf"))
    if TOP_GROUPS < GROUPS:
        first = tl.max(ranked, 1)
        best = first
        if BEST_TWO:
            place = tl.min(tl.where(ranked == first[:, None], member[None, :], SIZE_P), 1)
            best += tl.max(tl.where(member[None, :] == place[:, None], float("-inf"), ranked), 1)
        best = tl.where((group < GROUPS) & (best == best), best, float("-inf"))
        kept = tl.zeros([GROUPS_P], tl.int32)
        for _ in tl.static_range(TOP_GROUPS):
            top = tl.max(best, 0)
            place = tl.min(tl.where((best == top) & (kept == 0), group, GROUPS_P), 0)
            kept = tl.where(group == place, 1, kept)
            best = tl.where(group == place, float("-inf"), best)
        ranked = tl.where((kept == 1)[:, None], ranked, float("-inf"))
    choice = tl.arange(0, TOP_K_P)
    chosen = tl.zeros([TOP_K_P], tl.int32)
    weight = tl.zeros([TOP_K_P], tl.float32)
    for number in tl.static_range(TOP_K):
        _, place = _best(ranked, index, EXPERTS)
        own = tl.sum(tl.sum(tl.where((index == place) & present, scores, 0.0), 1), 0)
        chosen = tl.where(choice == number, place, chosen)
        weight = tl.where(choice == number, own, weight)
        ranked = tl.where(index == place, float("-inf"), ranked)
    if NORMALIZE:
        weight = weight / tl.maximum(tl.sum(weight, 0) + added_sum, least_sum)
    out = token * TOP_K + choice
    tl.store(experts + out, chosen, mask=choice < TOP_K)
    tl.store(weights + out, weight * scale, mask=choice < TOP_K)


def route(
    logits: torch.Tensor, spec: MoeSpec, correction_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Kernel version of ``headrace.kernels.moe.route``; experts in descending order of score, the first of equals."""
    tokens = len(logits)
    experts = torch.empty(tokens, spec.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, spec.top_k, dtype=torch.float32, device=logits.device)
    if not tokens:
        return experts, weights
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    # Groups that exclude none are one.
    groups = spec.num_groups if spec.top_groups < spec.num_groups else 1
    size = spec.num_experts // groups
    _route[(tokens,)](
        logits, logits if correction_bias is None else correction_bias, experts, weights, logits.stride(0), spec.routed_scale,
        spec.least_sum, spec.added_sum, TOP_K=spec.top_k, TOP_K_P=power_of_two(spec.top_k), EXPERTS=spec.num_experts,
        GROUPS=groups, GROUPS_P=power_of_two(groups), SIZE=size, SIZE_P=power_of_two(size),
        TOP_GROUPS=spec.top_groups if groups > 1 else 1, BEST_TWO=spec.group_score == "top2", SIGMOID=spec.scoring == "sigmoid",
        CORRECTION=correction_bias is not None, NORMALIZE=spec.normalize, num_warps=1, **options(logits.device),
    )  # fmt: skip
    return experts, weights


@launched(do_not_specialize=["count", "low", "high"])
def _held_experts(experts, out, count, low, high, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(experts + index, mask=index < count, other=0)
    own = tl.where((expert >= low) & (expert < high), expert, high) - low
    tl.store(out + index, own, mask=index < count)


def held_experts(experts: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.moe.held_experts``."""
    experts = experts.contiguous()
    out, count = torch.empty_like(experts), experts.numel()
    if count:
        grid = (cdiv(count, _BLOCK),)
        _held_experts[grid](experts, out, count, start, stop, BLOCK=_BLOCK, **options(experts.device))
    return out
