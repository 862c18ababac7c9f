"""Mixture of experts. References: ``headrace.kernels.moe.reference``.

Tokens are never moved: a stable counting sort gives their order by expert, and products gather rows through it. Only
the device knows how many tiles an expert has. The host launches the most there can be, and each program finds its expert's
tile, or that there is none, so a captured graph serves any routing.
"""

# A kernel's arguments have no types of Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from headrace.kernels.triton_pdl import begin, options
from headrace.model_spec import CLAMPED_SWIGLU, MoeSpec

_SILU, _GELU, _GELU_TANH, _CLAMPED = (tl.constexpr(number) for number in range(4))
_GATES = {"silu": 0, "swish": 0, "gelu": 1, "gelu_new": 2, "gelu_pytorch_tanh": 2, CLAMPED_SWIGLU: 3}
_CHUNK = 2048
"""Choices counted at a time."""
_FEW = 32
"""Choices up to which none are sorted: each gets its own tile, if there are enough experts that few tokens share one."""
_BLOCK = 1024
"""Channels of a program that sums up a token's experts."""


@dataclasses.dataclass(frozen=True)
class MoeTiling:
    """A program makes ``outputs`` numbers of ``tokens`` rows and reads ``channels`` of them at a time."""

    tokens: int
    outputs: int
    channels: int
    num_warps: int
    num_stages: int


def choose_tiling(choices: int, num_experts: int, in_features: int, out_features: int, itemsize: int) -> MoeTiling:
    """Chooses the tiling by the rows that an expert gets on average: few make the product a matter of reading weights.

    Args:
        choices: tokens times experts of a token.
        itemsize: bytes of a weight: wider ones are read fewer at a time, for they must fit in a program's shared memory.
    """
    rows = min(max(triton.next_power_of_2(triton.cdiv(choices, num_experts)), 16), 128)
    channels = min((128 if rows > 16 else 256) // max(itemsize, 2), max(triton.next_power_of_2(in_features), 16))
    outputs = min(64 if rows < 128 else 128, max(triton.next_power_of_2(out_features), 16))
    return MoeTiling(rows, outputs, channels, 8 if rows == 128 else 4, 3)


def batch_invariant_tiling(in_features: int, out_features: int, itemsize: int) -> MoeTiling:
    """One shape for any number of tokens: it settles the instruction, and with it the order in which products are summed up."""
    return choose_tiling(64, 1, in_features, out_features, itemsize)


# ---------------------------------------------------------------------------------------------------------------- routing


@triton.jit
def _best(values, index, COUNT: tl.constexpr):
    """The largest of ``values`` and its index, the first of equals; always an index below COUNT, if there are NaNs too."""
    top = tl.max(tl.max(values, 1), 0)
    place = tl.min(tl.min(tl.where(values == top, index, COUNT - 1), 1), 0)
    return top, place


@triton.jit
def _route(
    logits,
    correction,
    experts,
    weights,
    logits_row: tl.int64,
    scale,
    least_sum,
    TOP_K: tl.constexpr,
    TOP_K_P: tl.constexpr,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_P: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_P: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BEST_TWO: tl.constexpr,
    SIGMOID: tl.constexpr,
    CORRECTION: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):
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
        weight = weight / tl.maximum(tl.sum(weight, 0), least_sum)
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
        logits,
        logits if correction_bias is None else correction_bias,
        experts,
        weights,
        logits.stride(0),
        spec.routed_scale,
        spec.least_sum,
        TOP_K=spec.top_k,
        TOP_K_P=triton.next_power_of_2(spec.top_k),
        EXPERTS=spec.num_experts,
        GROUPS=groups,
        GROUPS_P=triton.next_power_of_2(groups),
        SIZE=size,
        SIZE_P=triton.next_power_of_2(size),
        TOP_GROUPS=spec.top_groups if groups > 1 else 1,
        BEST_TWO=spec.group_score == "top2",
        SIGMOID=spec.scoring == "sigmoid",
        CORRECTION=correction_bias is not None,
        NORMALIZE=spec.normalize,
        num_warps=1,
        **options(logits.device),
    )
    return experts, weights


@triton.jit(do_not_specialize=["count", "low", "high"])
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
        grid = (triton.cdiv(count, _BLOCK),)
        _held_experts[grid](experts, out, count, start, stop, BLOCK=_BLOCK, **options(experts.device))
    return out


# --------------------------------------------------------------------------------------------------------------- products


@triton.jit(do_not_specialize=["choices"])
def _sort(experts, order, start, choices, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """One expert: where its choices begin in the order, and which they are."""
    begin(PDL)
    own = tl.program_id(0)
    before = 0
    mine = 0
    for first in range(0, choices, CHUNK):
        index = first + tl.arange(0, CHUNK)
        expert = tl.load(experts + index, mask=index < choices, other=EXPERTS)
        before += tl.sum((expert < own).to(tl.int32), 0)
        mine += tl.sum((expert == own).to(tl.int32), 0)
    tl.store(start + own, before)
    if own == EXPERTS - 1:
        tl.store(start + EXPERTS, before + mine)
    if mine > 0:
        done = before
        for first in range(0, choices, CHUNK):
            index = first + tl.arange(0, CHUNK)
            hit = (tl.load(experts + index, mask=index < choices, other=EXPERTS) == own).to(tl.int32)
            tl.store(order + done + tl.cumsum(hit, 0) - 1, index, mask=hit == 1)
            done += tl.sum(hit, 0)


@triton.jit
def _tile(start, tile, EXPERTS: tl.constexpr, EXPERTS_P: tl.constexpr, TOKENS: tl.constexpr):
    """The expert of a tile (EXPERTS: there is no such tile), its first place in the order and the end of its expert's."""
    expert = tl.arange(0, EXPERTS_P)
    present = expert < EXPERTS
    low = tl.load(start + expert, mask=present, other=0)
    high = tl.load(start + expert + 1, mask=present, other=0)
    ends = tl.cumsum((high - low + TOKENS - 1) // TOKENS, 0)
    passed = present & (ends <= tile)
    owner = tl.sum(passed.to(tl.int32), 0)
    skipped = tl.max(tl.where(passed, ends, 0), 0)
    inside = tl.where(owner < EXPERTS, owner, EXPERTS - 1)
    first = tl.load(start + inside) + (tile - skipped) * TOKENS
    return owner, first, tl.load(start + inside + 1)


@triton.jit
def _rows(order, start, tile, EXPERTS: tl.constexpr, EXPERTS_P: tl.constexpr, TOKENS: tl.constexpr, SORTED: tl.constexpr):
    """The expert of a tile (EXPERTS: there is none such), its places in the order, which of them count, and their choices.

    Not SORTED, the order is that of the choices, each of which is a tile, and ``start`` is their experts.
    """
    if SORTED:
        expert, first, end = _tile(start, tile, EXPERTS, EXPERTS_P, TOKENS)
        place = first + tl.arange(0, TOKENS)
        used = place < end
        choice = tl.load(order + place, mask=used, other=0)
    else:
        expert = tl.load(start + tile)
        place = tile + tl.arange(0, TOKENS)
        used = place == tile
        choice = tl.where(used, place, 0)
    return expert, place, used, choice


@triton.jit
def _activate(gate, up, alpha, limit, GATE: tl.constexpr, DTYPE: tl.constexpr):
    """``act(gate) * up`` of sums that were rounded, rounded where the references round."""
    gate = gate.to(DTYPE).to(tl.float32)
    up = up.to(DTYPE).to(tl.float32)
    if GATE == _CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return ((up + 1.0) * gate * tl.sigmoid(alpha * gate)).to(DTYPE)
    if GATE == _SILU:
        active = gate * tl.sigmoid(gate)
    elif GATE == _GELU:
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # 0.5 x (1 + tanh u) is x sigmoid(2 u).
        bent = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate * tl.sigmoid(2.0 * bent)
    return (active.to(DTYPE).to(tl.float32) * up).to(DTYPE)


@triton.jit
def _up(
    x,
    order,
    start,
    weight,
    bias,
    out,
    x_row: tl.int64,
    alpha,
    limit,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_P: tl.constexpr,
    IN: tl.constexpr,
    INNER: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    GATE: tl.constexpr,
    BIAS: tl.constexpr,
    SORTED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of ``act(x gate^T) * (x up^T)``, written by order."""
    begin(PDL)
    expert, place, used, choice = _rows(order, start, tl.program_id(0), EXPERTS, EXPERTS_P, TOKENS, SORTED)
    if expert == EXPERTS:
        return
    token = choice // TOP_K
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    present = output < INNER
    rows = x + token.to(tl.int64)[:, None] * x_row
    base = expert.to(tl.int64) * 2 * INNER
    gates = weight + (base + output)[None, :] * IN
    ups = gates + INNER * IN
    gate = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    up = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for channel in range(0, IN, CHANNELS):
        inside = channel + tl.arange(0, CHANNELS)
        factor = tl.load(rows + inside[None, :], mask=used[:, None] & (inside < IN)[None, :], other=0.0)
        mask = (inside < IN)[:, None] & present[None, :]
        gate = tl.dot(factor, tl.load(gates + inside[:, None], mask=mask, other=0.0), gate, input_precision=PRECISION)
        up = tl.dot(factor, tl.load(ups + inside[:, None], mask=mask, other=0.0), up, input_precision=PRECISION)
    DTYPE: tl.constexpr = out.dtype.element_ty
    if BIAS:
        gate += tl.load(bias + base + output, mask=present, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + base + INNER + output, mask=present, other=0.0).to(tl.float32)[None, :]
    active = _activate(gate, up, alpha, limit, GATE, DTYPE)
    tl.store(out + place.to(tl.int64)[:, None] * INNER + output[None, :], active, mask=used[:, None] & present[None, :])


@triton.jit
def _down(
    x,
    order,
    start,
    weight,
    bias,
    factors,
    out,
    EXPERTS: tl.constexpr,
    EXPERTS_P: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BIAS: tl.constexpr,
    SORTED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """A tile of ``(x down^T) * factor``, x by order, written where each choice stands."""
    begin(PDL)
    expert, place, used, choice = _rows(order, start, tl.program_id(0), EXPERTS, EXPERTS_P, TOKENS, SORTED)
    if expert == EXPERTS:
        return
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    present = output < OUT
    rows = x + place.to(tl.int64)[:, None] * IN
    base = expert.to(tl.int64) * OUT
    columns = weight + (base + output)[None, :] * IN
    sums = tl.zeros([TOKENS, OUTPUTS], tl.float32)
    for channel in range(0, IN, CHANNELS):
        inside = channel + tl.arange(0, CHANNELS)
        factor = tl.load(rows + inside[None, :], mask=used[:, None] & (inside < IN)[None, :], other=0.0)
        part = tl.load(columns + inside[:, None], mask=(inside < IN)[:, None] & present[None, :], other=0.0)
        sums = tl.dot(factor, part, sums, input_precision=PRECISION)
    DTYPE: tl.constexpr = out.dtype.element_ty
    if BIAS:
        sums += tl.load(bias + base + output, mask=present, other=0.0).to(tl.float32)[None, :]
    sums = sums.to(DTYPE).to(tl.float32) * tl.load(factors + choice, mask=used, other=0.0)[:, None]
    tl.store(out + choice.to(tl.int64)[:, None] * OUT + output[None, :], sums.to(DTYPE), mask=used[:, None] & present[None, :])


@triton.jit
def _sum_choices(
    weighted,
    experts,
    plus,
    out,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PLUS: tl.constexpr,
    SOME: tl.constexpr,
    PDL: tl.constexpr,
):
    """The sum of a token's experts for a block of channels, in the order of choice. Expert EXPERTS has written nothing."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    present = channel < WIDTH
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        used = present
        if SOME:
            used = present & (tl.load(experts + token * TOP_K + choice) < EXPERTS)
        part = tl.load(weighted + (token * TOP_K + choice) * WIDTH + channel, mask=used, other=0.0)
        total += part.to(tl.float32)
    if PLUS:
        added = tl.load(plus + token * WIDTH + channel, mask=present, other=0.0).to(tl.float32)
        total = total.to(out.dtype.element_ty).to(tl.float32) + added
    tl.store(out + token * WIDTH + channel, total.to(out.dtype.element_ty), mask=present)


def most_tiles(choices: int, num_experts: int, tokens: int) -> int:
    """Returns the most tiles of ``tokens`` choices of one expert each that any routing makes of ``choices`` choices."""
    busy = min(choices, num_experts)
    return busy + (choices - busy) // tokens


def moe_mlp(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    spec: MoeSpec,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    tiling: MoeTiling | None = None,
    *,
    plus: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.moe.moe_mlp``.

    ``tiling`` replaces the one chosen by size.
    """
    tokens, hidden = x.shape
    inner, count, choices = spec.intermediate_size, spec.num_held, experts.numel()
    if not choices:
        return torch.empty_like(x)
    device = x.device
    in_order = batch_invariant or (tokens > 1 and choices > min(_FEW, count // 4))
    if in_order:
        order = torch.empty(choices, dtype=torch.int32, device=device)
        start = torch.empty(count + 1, dtype=torch.int32, device=device)
        chunk = min(_CHUNK, triton.next_power_of_2(choices))
        _sort[(count,)](experts, order, start, choices, EXPERTS=count, CHUNK=chunk, num_warps=4, **options(device))
    else:
        order = start = experts
    active = torch.empty(choices, inner, dtype=x.dtype, device=device)
    out = torch.empty(choices, hidden, dtype=x.dtype, device=device)
    shared = {
        "EXPERTS": count,
        "EXPERTS_P": triton.next_power_of_2(count),
        "SORTED": in_order,
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        **options(device),
    }

    def chosen(size_in: int, size_out: int) -> MoeTiling:
        if batch_invariant:
            return batch_invariant_tiling(size_in, size_out, x.itemsize)
        return tiling or choose_tiling(choices, count, size_in, size_out, x.itemsize)

    first = chosen(hidden, inner)
    _up[_grid(choices, count, inner, first, in_order)](
        x,
        order,
        start,
        gate_up,
        gate_up if gate_up_bias is None else gate_up_bias,
        active,
        x.stride(0),
        spec.alpha,
        spec.limit,
        TOP_K=spec.top_k,
        IN=hidden,
        INNER=inner,
        GATE=_GATES[spec.act],
        BIAS=gate_up_bias is not None,
        **shared,
        **_launch(first),
    )
    second = chosen(inner, hidden)
    _down[_grid(choices, count, hidden, second, in_order)](
        active,
        order,
        start,
        down,
        down if down_bias is None else down_bias,
        weights,
        out,
        IN=inner,
        OUT=hidden,
        BIAS=down_bias is not None,
        **shared,
        **_launch(second),
    )
    return _sum(out, experts, plus, spec)


def _sum(weighted: torch.Tensor, experts: torch.Tensor, plus: torch.Tensor | None, spec: MoeSpec) -> torch.Tensor:
    """``[T * top_k, hidden] -> [T, hidden]``"""
    tokens, hidden = len(experts), weighted.shape[1]
    total = torch.empty(tokens, hidden, dtype=weighted.dtype, device=weighted.device)
    block = min(_BLOCK, triton.next_power_of_2(hidden))
    _sum_choices[(tokens, triton.cdiv(hidden, block))](
        weighted,
        experts,
        total if plus is None else plus,
        total,
        EXPERTS=spec.num_held,
        SOME=spec.held is not None,
        WIDTH=hidden,
        TOP_K=spec.top_k,
        BLOCK=block,
        PLUS=plus is not None,
        num_warps=max(block // 256, 1),
        **options(weighted.device),
    )
    return total


def _grid(choices: int, num_experts: int, outputs: int, tiling: MoeTiling, in_order: bool) -> tuple[int, int]:
    """Tiles of one expert follow each other, so that they find its weights in the cache."""
    tiles = most_tiles(choices, num_experts, tiling.tokens) if in_order else choices
    return tiles, triton.cdiv(outputs, tiling.outputs)


def _launch(tiling: MoeTiling) -> dict[str, int]:
    return {
        "TOKENS": tiling.tokens,
        "OUTPUTS": tiling.outputs,
        "CHANNELS": tiling.channels,
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
    }
