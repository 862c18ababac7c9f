"""Products of rows with experts' weights. References: ``headrace.kernels.moe.reference``.

Tokens are never moved: a sort gives their order by expert (``triton_sort``), and products gather rows through it, so a captured
graph serves any routing.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace.kernels import support
from headrace.kernels.kv_cache.triton_fp8 import NATIVE, gain, mode, quantized, scale_of
from headrace.kernels.moe import cuda_experts, cuda_mlp
from headrace.kernels.moe.codes import BLOCK, MIDDLE, X_GROUP, ExpertCodes
from headrace.kernels.moe.reference import ExpertFactors
from headrace.kernels.moe.tiling import Kind, MoeTiling, batch_invariant_tiling, choose_tiling
from headrace.kernels.moe.triton_adapters import ExpertsLow, constants, shrink, tensors, with_added
from headrace.kernels.moe.triton_codecs import (
    AS_E4M3,
    AS_HALF,
    CODECS,
    E4M3,
    FLOATS,
    MINIMA,
    ON_WEIGHTS,
    SYMMETRIC,
    ZEROS,
    add_product,
    along,
    as_float,
    fetched_rows,
    for_outputs,
    step_of_rows,
)
from headrace.kernels.moe.triton_rounding import Rounding, round_rows, rounding_of
from headrace.kernels.moe.triton_sort import Routing, sort_choices, tile_rows
from headrace.kernels.support import cdiv, power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import begin, options
from headrace.model_spec import CLAMPED_SWIGLU, MoeSpec

_SILU, _GELU, _GELU_TANH, _CLAMPED, _UNGATED = (tl.constexpr(number) for number in range(5))
_GATES = {"silu": 0, "swish": 0, "gelu": 1, "gelu_new": 2, "gelu_pytorch_tanh": 2, CLAMPED_SWIGLU: 3, "relu2": 4}
_NOT, _DYNAMIC, _STATIC = (tl.constexpr(number) for number in range(3))
"""Whether activations are rounded to e4m3: not, with scales of their own, or with a given one."""
_BLOCK = 1024
"""Channels of a program that sums up a token's experts."""


@triton.jit
def _tile_and_outputs(tiles, OUT: tl.constexpr, OUTPUTS: tl.constexpr, BAND: tl.constexpr):
    """The tile of rows and the tile of outputs of a program: a band of the first goes through all of the second, and tiles of
    one expert follow each other."""
    across: tl.constexpr = (OUT + OUTPUTS - 1) // OUTPUTS
    band, within = tl.program_id(0) // (BAND * across), tl.program_id(0) % (BAND * across)
    height = tl.minimum(tiles - band * BAND, BAND)
    return band * BAND + within % height, within // height


@triton.jit
def _activate(gate, up, alpha, limit, GATE: tl.constexpr, DTYPE: tl.constexpr):
    """``act(gate) * up`` of sums that were rounded, rounded where the references round. _UNGATED: ``relu(gate) ** 2``."""
    gate = gate.to(DTYPE).to(tl.float32)
    if GATE == _UNGATED:
        gate = tl.maximum(gate, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return (gate * gate).to(DTYPE)
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
def _scales_of_rows(scales, row, used, group, column, SCALED: tl.constexpr, SWAP: tl.constexpr):
    """The factors of a tile's rows in a group of channels."""
    if SCALED == _STATIC:
        return tl.load(scales)
    else:
        return along(tl.load(scales + group * column + row, mask=used, other=0.0), not SWAP)


@triton.jit
def _finish(
    sums, scales, expert, row, first, x_scale, OUT: tl.constexpr, IN: tl.constexpr, OUTPUTS: tl.constexpr, CODEC: tl.constexpr,
    SHARED_OUT: tl.constexpr, SHARED_IN: tl.constexpr, OFFSETS: tl.constexpr, FACTOR: tl.constexpr, MODE: tl.constexpr,
    SWAP: tl.constexpr
):  # fmt: skip
    """Applies the scales that all channels share. ``x_scale``: of the rows."""
    if CODEC == FLOATS:
        return sums
    else:
        factor = x_scale
        if SHARED_IN >= IN and OFFSETS < ON_WEIGHTS:
            scale = for_outputs(scales, expert, row, first, 0, OUT, 1, SHARED_OUT, OUTPUTS, SWAP)
            factor = as_float(scale, CODEC) * x_scale
        if FACTOR == AS_HALF:
            factor = factor * gain(MODE)
        if CODEC == E4M3 and FACTOR != AS_E4M3:
            factor = factor * gain(MODE)
        return sums * factor


@launched(do_not_specialize=["x_column", "out_column", "tiles"])
def _up(
    x, x_scales, order, start, weight, scales, offsets, inputs, bias, low, b, places, out, out_scales, x_row: tl.int64,
    x_column: tl.int64, out_column: tl.int64, b_place: tl.int64, tiles, alpha, limit, TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr, EXPERTS_P: tl.constexpr, IN: tl.constexpr, INNER: tl.constexpr, TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr, CHANNELS: tl.constexpr,
    STEP: tl.constexpr, GATE: tl.constexpr, BIAS: tl.constexpr, SORTED: tl.constexpr, PRECISION: tl.constexpr,
    CODEC: tl.constexpr, SHARED_OUT: tl.constexpr, SHARED_IN: tl.constexpr, OFFSETS: tl.constexpr, ORDERED: tl.constexpr,
    FACTOR: tl.constexpr, SCALED: tl.constexpr, X_GROUP: tl.constexpr, ROUND: tl.constexpr, DTYPE: tl.constexpr,
    MODE: tl.constexpr, SWAP: tl.constexpr, FETCH: tl.constexpr, BAND: tl.constexpr, RANK: tl.constexpr,
    NUM_PLACES: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A tile of ``act(x gate^T) * (x up^T)``, written by order; of experts without gates, the up stands for the gate.
    ROUND: as e4m3."""
    begin(PDL)
    HEIGHT: tl.constexpr = INNER if GATE == _UNGATED else 2 * INNER
    tile, slice_ = _tile_and_outputs(tiles, INNER, OUTPUTS, BAND)
    expert, place, used, choice = tile_rows(order, start, tile, EXPERTS, EXPERTS_P, TOKENS, SORTED)
    if expert == EXPERTS:
        return
    token = choice // TOP_K
    rows = token.to(tl.int64) * x_row
    own_inputs = inputs + expert.to(tl.int64) * IN
    first = slice_ * OUTPUTS
    output = first + tl.arange(0, OUTPUTS)
    present = output < INNER
    # Rows past the gate's are the up's first: what they give is not written.
    gate = tl.zeros([OUTPUTS, TOKENS] if SWAP else [TOKENS, OUTPUTS], tl.float32)
    up = tl.zeros([OUTPUTS, TOKENS] if SWAP else [TOKENS, OUTPUTS], tl.float32)
    for begins in range(0, IN, CHANNELS):
        for step in tl.static_range(0, CHANNELS, STEP):
            at = begins + step
            parts = step_of_rows(x, rows, used, own_inputs, at, IN, STEP, CODEC, FACTOR, MODE, SWAP, ORDERED)
            x_scale = 1.0
            if SCALED == _DYNAMIC and X_GROUP < IN:
                group = tl.minimum(at // X_GROUP, (IN - 1) // X_GROUP)
                x_scale = _scales_of_rows(x_scales, token, used, group, x_column, SCALED, SWAP)
            gate = add_product(
                gate, parts, x_scale, weight, scales, offsets, expert, output, first, at, HEIGHT, IN, OUTPUTS, STEP,
                CODEC, SHARED_OUT, SHARED_IN, OFFSETS, FACTOR, MODE, SWAP, PRECISION, FETCH,
            )  # fmt: skip
            if GATE != _UNGATED:
                up = add_product(
                    up, parts, x_scale, weight, scales, offsets, expert, INNER + output, INNER + first, at, HEIGHT, IN,
                    OUTPUTS, STEP, CODEC, SHARED_OUT, SHARED_IN, OFFSETS, FACTOR, MODE, SWAP, PRECISION, FETCH,
                )  # fmt: skip
    factor = 1.0
    if SCALED == _STATIC or (SCALED == _DYNAMIC and X_GROUP >= IN):
        factor = _scales_of_rows(x_scales, token, used, 0, x_column, SCALED, SWAP)
    gate = _finish(gate, scales, expert, output, first, factor, HEIGHT, IN, OUTPUTS, CODEC, SHARED_OUT, SHARED_IN, OFFSETS,
                   FACTOR, MODE, SWAP)  # fmt: skip
    PARTS: tl.constexpr = HEIGHT // INNER
    if RANK:
        gate = with_added(gate, low, b, places, token, place, used, expert * PARTS, 0, output, b_place, INNER, PARTS, RANK,
                          NUM_PLACES, COLUMNS, SWAP, PRECISION)  # fmt: skip
    base = bias + expert.to(tl.int64) * HEIGHT
    if BIAS:
        gate += along(tl.load(base + output, mask=present, other=0.0).to(tl.float32), SWAP)
    if GATE != _UNGATED:
        up = _finish(up, scales, expert, INNER + output, INNER + first, factor, HEIGHT, IN, OUTPUTS, CODEC, SHARED_OUT,
                     SHARED_IN, OFFSETS, FACTOR, MODE, SWAP)  # fmt: skip
        if RANK:
            up = with_added(up, low, b, places, token, place, used, expert * PARTS, 1, output, b_place, INNER, PARTS, RANK,
                            NUM_PLACES, COLUMNS, SWAP, PRECISION)  # fmt: skip
    if BIAS and GATE != _UNGATED:
        up += along(tl.load(base + INNER + output, mask=present, other=0.0).to(tl.float32), SWAP)
    active = _activate(gate, up, alpha, limit, GATE, DTYPE)
    at = along(place.to(tl.int64) * INNER, not SWAP) + along(output, SWAP)
    mask = along(used, not SWAP) & along(present, SWAP)
    if ROUND == _NOT:
        tl.store(out + at, active, mask=mask)
    else:
        value = tl.where(along(present, SWAP), active.to(tl.float32), 0.0)
        if ROUND == _STATIC:
            scale = tl.load(out_scales)
        else:
            own = scale_of(value, 0 if SWAP else 1)
            tl.store(out_scales + slice_ * out_column + place, own, mask=used)
            scale = along(own, not SWAP)
        tl.store(out + at, quantized(value, value * 0.0 + scale, MODE), mask=mask)


@launched(do_not_specialize=["x_column", "tiles"])
def _down(
    x, x_scales, order, start, weight, scales, offsets, inputs, bias, low, b, places, factors, out, x_column: tl.int64,
    b_place: tl.int64, tiles, TOP_K: tl.constexpr, EXPERTS: tl.constexpr,
    EXPERTS_P: tl.constexpr, IN: tl.constexpr, OUT: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr,
    CHANNELS: tl.constexpr, STEP: tl.constexpr, BIAS: tl.constexpr, SORTED: tl.constexpr, PRECISION: tl.constexpr,
    CODEC: tl.constexpr, SHARED_OUT: tl.constexpr, SHARED_IN: tl.constexpr, OFFSETS: tl.constexpr, ORDERED: tl.constexpr,
    FACTOR: tl.constexpr, SCALED: tl.constexpr, X_GROUP: tl.constexpr, MODE: tl.constexpr, SWAP: tl.constexpr,
    FETCH: tl.constexpr, BAND: tl.constexpr, RANK: tl.constexpr, NUM_PLACES: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A tile of ``(x down^T) * factor``, x by order, written where each choice stands. FETCH: x is a tensor descriptor too."""
    begin(PDL)
    tile, slice_ = _tile_and_outputs(tiles, OUT, OUTPUTS, BAND)
    expert, place, used, choice = tile_rows(order, start, tile, EXPERTS, EXPERTS_P, TOKENS, SORTED)
    if expert == EXPERTS:
        return
    first = slice_ * OUTPUTS
    output = first + tl.arange(0, OUTPUTS)
    present = output < OUT
    rows = place.to(tl.int64) * IN
    first_place = tl.min(place, 0)
    own_inputs = inputs + expert.to(tl.int64) * IN
    sums = tl.zeros([OUTPUTS, TOKENS] if SWAP else [TOKENS, OUTPUTS], tl.float32)
    for begins in range(0, IN, CHANNELS):
        for step in tl.static_range(0, CHANNELS, STEP):
            at = begins + step
            if FETCH:
                parts = (fetched_rows(x, first_place, at, FACTOR, MODE, SWAP),)
            else:
                parts = step_of_rows(x, rows, used, own_inputs, at, IN, STEP, CODEC, FACTOR, MODE, SWAP, ORDERED)
            x_scale = 1.0
            if SCALED == _DYNAMIC and X_GROUP < IN:
                group = tl.minimum(at // X_GROUP, (IN - 1) // X_GROUP)
                x_scale = _scales_of_rows(x_scales, place, used, group, x_column, SCALED, SWAP)
            sums = add_product(
                sums, parts, x_scale, weight, scales, offsets, expert, output, first, at, OUT, IN, OUTPUTS, STEP, CODEC,
                SHARED_OUT, SHARED_IN, OFFSETS, FACTOR, MODE, SWAP, PRECISION, FETCH,
            )  # fmt: skip
    factor = 1.0
    if SCALED == _STATIC or (SCALED == _DYNAMIC and X_GROUP >= IN):
        factor = _scales_of_rows(x_scales, place, used, 0, x_column, SCALED, SWAP)
    sums = _finish(sums, scales, expert, output, first, factor, OUT, IN, OUTPUTS, CODEC, SHARED_OUT, SHARED_IN, OFFSETS,
                   FACTOR, MODE, SWAP)  # fmt: skip
    if RANK:
        sums = with_added(sums, low, b, places, choice // TOP_K, place, used, expert, 0, output, b_place, OUT, 1, RANK,
                          NUM_PLACES, COLUMNS, SWAP, PRECISION)  # fmt: skip
    DTYPE: tl.constexpr = out.dtype.element_ty
    if BIAS:
        base = bias + expert.to(tl.int64) * OUT
        sums += along(tl.load(base + output, mask=present, other=0.0).to(tl.float32), SWAP)
    sums = sums.to(DTYPE).to(tl.float32) * along(tl.load(factors + choice, mask=used, other=0.0), not SWAP)
    at = along(choice.to(tl.int64) * OUT, not SWAP) + along(output, SWAP)
    tl.store(out + at, sums.to(DTYPE), mask=along(used, not SWAP) & along(present, SWAP))


@launched
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


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Work of ``moe_mlp`` that an earlier kernel has done."""

    routing: Routing | None = None
    rounding: Rounding | None = None
    """It is done."""


Held = torch.Tensor | ExpertCodes
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def moe_mlp(
    x: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    gate_up: Held,
    down: Held,
    spec: MoeSpec,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    tiling: MoeTiling | None = None,
    *,
    plus: torch.Tensor | None = None,
    adapters: ExpertFactors | None = None,
    prepared: Prepared | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.moe.moe_mlp``.

    ``tiling`` replaces the one chosen by size.
    """
    if not experts.numel():
        return torch.empty_like(x)
    hidden, inner = x.shape[1], spec.intermediate_size
    plain = tiling is None and adapters is None and gate_up_bias is None and down_bias is None and not batch_invariant
    both = cuda_mlp.taken(x, experts, weights, gate_up, down, spec) if plain else None
    if both is not None:
        return _sum(cuda_mlp.products(x, experts, weights, *both), experts, plus, spec)
    sizes = experts.numel(), spec.num_held
    first = product_tiling(gate_up, x, *sizes, inner, tiling, paired=spec.gated, batch_invariant=batch_invariant)
    second = product_tiling(down, x, *sizes, hidden, tiling, batch_invariant=batch_invariant)
    routing, rounding = (None, None) if prepared is None else (prepared.routing, prepared.rounding)
    due = rounding_for(x, gate_up) if rounding is None else None
    rounding = rounding or due
    if routing is None:
        routing = sort_choices(experts, spec.num_held, batch_invariant, due, first.tokens)
    elif due is not None:
        due.launch()
    taken = (x, x) if rounding is None else (_typed(rounding.codes, gate_up), rounding.scales)
    few = cuda_experts.taken(gate_up, down, spec, routing, x.dtype) if plain else None
    if few is not None:
        rows, scales = _rounded(cuda_experts.first(*taken, routing, few[0], spec.top_k, x.dtype), down)
        return _sum(cuda_experts.second(rows, scales, routing, few[1], weights, x.dtype), experts, plus, spec)
    low = None if adapters is None else shrink(x, adapters.gate_up, adapters.places, routing, spec.top_k)
    active = _gate_up(x, *taken, routing, gate_up, gate_up_bias, low, down, spec, first)
    if adapters is not None and isinstance(active, torch.Tensor):
        low = shrink(active, adapters.down, adapters.places, routing, spec.top_k, by_order=True)
    rows, scales = _rounded(active, down) if isinstance(active, torch.Tensor) else active
    weighted = _weighted(rows, scales, x.dtype, routing, down, down_bias, low, weights, hidden, spec.top_k, second)
    return _sum(weighted, experts, plus, spec)


def rounding_for(x: torch.Tensor, gate_up: Held) -> Rounding | None:
    """The rounding of x that the first product takes, which is not done yet."""
    return rounding_of(x, gate_up) if isinstance(gate_up, ExpertCodes) and gate_up.x_group is not None else None


def product_tiling(
    held: Held,
    x: torch.Tensor,
    choices: int,
    count: int,
    outputs: int,
    given: MoeTiling | None = None,
    *,
    paired: bool = False,
    batch_invariant: bool = False,
) -> MoeTiling:
    """Chooses the tiling of a product of rows of x's dtype with ``held``, unless it is ``given``.

    Args:
        choices: tokens times experts of a token.
        count: experts.
        paired: a program has the outputs of gate and up.
    """
    kind: Kind = held.kind if isinstance(held, ExpertCodes) else "floats"
    inputs = held.shape[-1]
    fetches = _fetches(held, x, inputs)
    if batch_invariant:
        found = batch_invariant_tiling(inputs, outputs, x.itemsize, kind, paired=paired)
    else:
        found = given or choose_tiling(choices, count, inputs, outputs, x.itemsize, kind, paired=paired, fetches=fetches)
    return found if fetches else dataclasses.replace(found, fetch=False)


def _gate_up(
    x: torch.Tensor,
    rows: torch.Tensor,
    x_scales: torch.Tensor,
    routing: Routing,
    held: Held,
    bias: torch.Tensor | None,
    low: ExpertsLow | None,
    down: Held,
    spec: MoeSpec,
    tiling: MoeTiling,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The inputs of the second product, by order; rounded, with their scales, where ``down`` takes them so and no adapter.

    ``rows`` and ``x_scales`` are x as the product takes it.
    """
    inner, choices, device = spec.intermediate_size, routing.choices, x.device
    rounds = _NOT
    if isinstance(down, ExpertCodes) and down.x_group is not None and low is None:
        rounds = _STATIC if down.x_scale is not None else _DYNAMIC if tiling.outputs == down.x_group else _NOT
    active = torch.empty(choices, inner, dtype=x.dtype if rounds == _NOT else torch.uint8, device=device)
    scales = active
    if isinstance(down, ExpertCodes) and rounds != _NOT:
        groups, given = cdiv(inner, X_GROUP), down.x_scale
        scales = torch.empty(groups, choices, dtype=torch.float32, device=device) if given is None else given
    tiles = routing.tiles(tiling.tokens)
    *added, b_place = tensors(low, rows)
    _up[(tiles * cdiv(inner, tiling.outputs),)](
        rows,
        x_scales,
        routing.order,
        routing.begins(tiling.tokens),
        *_tensors(held, tiling, x.shape[1]),
        rows if bias is None else bias,
        *added,
        active,
        scales,
        rows.stride(0),
        x_scales.stride(0),
        choices,
        b_place,
        tiles,
        spec.alpha,
        spec.limit,
        TOP_K=spec.top_k,
        IN=x.shape[1],
        INNER=inner,
        GATE=_GATES[spec.act],
        BIAS=bias is not None,
        ROUND=rounds,
        DTYPE=_TYPES[x.dtype],
        **constants(low),
        **_format(held, tiling, x.shape[1]),
        **routing.options(tiling, x),
    )
    return active if rounds == _NOT else (_typed(active, down), scales)


def _weighted(
    x: torch.Tensor,
    x_scales: torch.Tensor,
    dtype: torch.dtype,
    routing: Routing,
    held: Held,
    bias: torch.Tensor | None,
    low: ExpertsLow | None,
    weights: torch.Tensor,
    hidden: int,
    top_k: int,
    tiling: MoeTiling,
) -> torch.Tensor:
    """The output of each choice times its weight, ``[choices, hidden]``."""
    inner = x.shape[1]
    out = torch.empty(routing.choices, hidden, dtype=dtype, device=x.device)
    tiles, form = routing.tiles(tiling.tokens), _format(held, tiling, inner)
    *added, b_place = tensors(low, x)
    _down[(tiles * cdiv(hidden, tiling.outputs),)](
        _lines(x, routing.choices, inner, tiling.tokens, form["STEP"]) if tiling.fetch else x,
        x_scales,
        routing.order,
        routing.begins(tiling.tokens),
        *_tensors(held, tiling, inner),
        x if bias is None else bias,
        *added,
        weights,
        out,
        x_scales.stride(0),
        b_place,
        tiles,
        TOP_K=top_k,
        IN=inner,
        OUT=hidden,
        BIAS=bias is not None,
        **constants(low),
        **form,
        **routing.options(tiling, out),
    )
    return out


def _rounded(x: torch.Tensor, held: Held) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as a product with the weight takes them, and their scales."""
    if isinstance(held, ExpertCodes) and held.x_group is not None:
        codes, scales = round_rows(x, held)
        return _typed(codes, held), scales
    return x, x


def _tensors(
    held: Held, tiling: MoeTiling, inputs: int
) -> tuple[torch.Tensor | TensorDescriptor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales, offsets and the order of inputs, or tensors that are not read in their places."""
    codes = held if isinstance(held, torch.Tensor) else _typed(held.codes, held)
    factor = codes
    if tiling.fetch:
        step = _format(held, tiling, inputs)["STEP"]
        factor = _lines(codes, math.prod(held.shape[:2]), inputs, tiling.outputs, step)
    if isinstance(held, torch.Tensor):
        return factor, codes, codes, codes
    scales = held.scales
    return factor, scales, scales if held.offsets is None else held.offsets, codes if held.order is None else held.order


def _lines(values: torch.Tensor, rows: int, width: int, tile: int, channels: int) -> TensorDescriptor:
    """Describes contiguous ``[rows, width]``, of which tiles are fetched."""
    return TensorDescriptor(values, [rows, width], [width, 1], [tile, channels])


def _fetches(held: Held, x: torch.Tensor, inputs: int) -> bool:
    """Whether the tensor memory accelerator brings tiles of the weight, which starts each row at a multiple of 16 bytes."""
    codes = held if isinstance(held, torch.Tensor) else held.codes
    if isinstance(held, ExpertCodes) and (held.codec != "e4m3" or held.x_group is None or held.order is not None):
        return False
    aligned = not (inputs * codes.itemsize % 16 or codes.data_ptr() % 16)
    return aligned and codes.itemsize <= 2 and (support.is_hopper(x.device) or support.interpreted())


def _typed(codes: torch.Tensor, held: Held) -> torch.Tensor:
    """Bytes as e4m3 where the device multiplies that."""
    native = isinstance(held, ExpertCodes) and held.x_group is not None and mode(codes.device) == NATIVE
    return codes.view(torch.float8_e4m3fn) if native and codes.dtype == torch.uint8 else codes


def _format(held: Held, tiling: MoeTiling, channels: int) -> dict[str, Any]:
    """The kernel's constants of the number format."""
    if isinstance(held, torch.Tensor):
        constants = {"CODEC": FLOATS, "SHARED_OUT": 1, "SHARED_IN": 1, "OFFSETS": SYMMETRIC, "ORDERED": False, "FACTOR": 0}
        return {**constants, "SCALED": _NOT, "X_GROUP": 1, "STEP": tiling.channels}
    rounded = held.x_group is not None
    x_group = held.x_group or channels
    # A step of e4m3 has one scale of the weights and one of a row.
    shared = [size for size in (held.group[1], x_group) if size < channels]
    return {
        "CODEC": CODECS[held.codec],
        "SHARED_OUT": held.group[0],
        "SHARED_IN": held.group[1],
        "OFFSETS": _offsets(held),
        "ORDERED": held.order is not None,
        "FACTOR": (1 if mode(held.codes.device) == NATIVE else 2) if rounded else 0,
        "SCALED": _NOT if not rounded else _DYNAMIC if held.x_scale is None else _STATIC,
        "X_GROUP": x_group,
        "STEP": BLOCK if held.codec != "e4m3" else min([tiling.channels, *shared]),
    }


def _offsets(held: ExpertCodes) -> tl.constexpr:
    if held.codec in MIDDLE and held.on_weights:
        return MINIMA if held.minima is not None else ON_WEIGHTS
    return SYMMETRIC if held.offsets is None else ZEROS


def _sum(weighted: torch.Tensor, experts: torch.Tensor, plus: torch.Tensor | None, spec: MoeSpec) -> torch.Tensor:
    """``[T * top_k, hidden] -> [T, hidden]``"""
    tokens, hidden = len(experts), weighted.shape[1]
    total = torch.empty(tokens, hidden, dtype=weighted.dtype, device=weighted.device)
    block = min(_BLOCK, power_of_two(hidden))
    _sum_choices[(tokens, cdiv(hidden, block))](
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
