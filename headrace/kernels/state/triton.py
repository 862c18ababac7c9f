"""State layers. References: ``headrace.kernels.state.reference``.

Decode rows, and prompts where a step says so, are absorbed token by token, the states in registers: a program has a part of
one row's state and absorbs the row's tokens in order, so that no result depends on how a sequence is cut into steps, or on
other rows. Other prompts are absorbed by ``triton_tiles``.
"""

# A kernel's tuples grow.
# mypy: disable-error-code=assignment

from __future__ import annotations

import math
from typing import Literal

import torch
import triton.language as tl

from headrace.kernels.activation.triton import sigmoid
from headrace.kernels.kv_cache.triton_fp8 import mode
from headrace.kernels.state.metadata import Pending, StateMetadata, token_rows
from headrace.kernels.state.reference import Gate
from headrace.kernels.state.triton_conv import convolve_prompts
from headrace.kernels.state.triton_kept import delta_rows
from headrace.kernels.state.triton_tiles import delta_prompts, softplus, space_prompts
from headrace.kernels.support import cdiv, power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import announce, begin, options, wait

_EARLY_ROWS = 8
"""Decode rows up to which programs of recurrences that write each state read these before the kernel before is complete:
earlier steps alone wrote them, and a step begins with launches that wait for all of the one before. With more rows, whose
programs do not all run at once, it was slower. Convolutions, and recurrences that seldom write states, always do so."""
_FEW, _FEW_TILE, _TILE = 31, (128, 1), (512, 4)
"""Decode rows up to which a program of their convolution has so many channels and rows; and those that it has with more."""
_NORMED = 1024
"""Channels that a program norms, where several groups have so many. No group's sum depends on the number of tokens."""
_VALUES = 8
"""Rows of a head's state of one program, at most."""
_WARPS = 1
"""Warps of such a program. With one, no token waits for others to add up."""


@launched(do_not_specialize=["rows"])
def _conv_rows(
    x, weight, bias, cache, out, blocks, starts, rows, channels, x_row: tl.int64, cache_block: tl.int64, TAPS: tl.constexpr,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, MODE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """The only token of each of ``ROWS`` rows, which has the row's number, and whose input is kept."""
    announce(PDL)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    mask = channel < channels
    factors = ()
    for tap in tl.static_range(TAPS):
        factors += (tl.load(weight + channel * TAPS + tap, mask=mask, other=0.0).to(tl.float32),)
    # All loads come first, so that they are under way together.
    kept, places, totals = (), (), ()
    for each in tl.static_range(ROWS):
        row = tl.program_id(1) * ROWS + each
        block = tl.load(blocks + row, mask=row < rows, other=-1).to(tl.int64)
        kept += (mask & (block >= 0),)
        start = tl.load(starts + row, mask=row < rows, other=0)
        ring = cache + tl.maximum(block, 0) * cache_block + channel
        places += (ring + start % (TAPS - 1) * channels,)
        total = tl.zeros([CHANNELS], tl.float32)
        for tap in tl.static_range(TAPS - 1):
            place = ring + (start + tap) % (TAPS - 1) * channels
            total += tl.load(place, mask=kept[each], other=0.0).to(tl.float32) * factors[tap]
        totals += (total,)
    if BIAS:
        added = tl.load(bias + channel, mask=mask, other=0.0).to(tl.float32)
    wait(PDL)
    first, now = (tl.program_id(1) * ROWS).to(tl.int64), ()
    for each in tl.static_range(ROWS):
        now += (tl.load(x + (first + each) * x_row + channel, mask=kept[each], other=0.0),)
    # All threads have read the rings.
    tl.debug_barrier()
    for each in tl.static_range(ROWS):
        total = totals[each] + now[each].to(tl.float32) * factors[TAPS - 1]
        if BIAS:
            total += added
        if SILU:
            total = total * sigmoid(total, MODE)
        total = tl.where(kept[each], total, 0.0).to(out.dtype.element_ty)
        tl.store(out + (first + each) * channels + channel, total, mask=mask & (first + each < rows))
        tl.store(places[each], now[each], mask=kept[each])


@launched(do_not_specialize=["heads"])
def _delta_rule(
    qkv, decay, beta, a_log, dt_bias, state, out, query_start, blocks, heads, beta_factor, scale, qkv_row: tl.int64,
    decay_row: tl.int64, beta_row: tl.int64, state_block: tl.int64, SHARE: tl.constexpr, DK: tl.constexpr, DK_P: tl.constexpr,
    DV: tl.constexpr, VALUES: tl.constexpr, BY_CHANNEL: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """``VALUES`` rows of a head's state; SHARE heads have one key head."""
    if EARLY:
        announce(PDL)
    else:
        begin(PDL)
    head, row = tl.program_id(1), tl.program_id(2)
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    channel = tl.arange(0, DK_P)
    in_value, in_key = value < DV, channel < DK
    block = tl.load(blocks + row).to(tl.int64)
    live = block >= 0
    place = state + tl.maximum(block, 0) * state_block + (head * DV + value[:, None]) * DK + channel[None, :]
    inside = in_value[:, None] & in_key[None, :] & live
    held = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    rate = -tl.exp(tl.load(a_log + head))
    own, keys = head // SHARE * DK + channel, heads // SHARE * DK
    if BY_CHANNEL:
        added = tl.load(dt_bias + head * DK + channel, mask=in_key, other=0.0)
    else:
        added = tl.load(dt_bias + head)
    if EARLY:
        wait(PDL)
    for token in range(tl.load(query_start + row).to(tl.int64), tl.load(query_start + row + 1).to(tl.int64)):
        q = tl.load(qkv + token * qkv_row + own, mask=in_key, other=0.0).to(tl.float32)
        k = tl.load(qkv + token * qkv_row + keys + own, mask=in_key, other=0.0).to(tl.float32)
        v = tl.load(qkv + token * qkv_row + 2 * keys + head * DV + value, mask=in_value, other=0.0).to(tl.float32)
        q = q * tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
        k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        if BY_CHANNEL:
            fade = tl.load(decay + token * decay_row + head * DK + channel, mask=in_key, other=0.0).to(tl.float32)
            held = held * tl.exp(rate * softplus(fade + added))[None, :]
        else:
            held = held * tl.exp(rate * softplus(tl.load(decay + token * decay_row + head).to(tl.float32) + added))
        strength = beta_factor * tl.sigmoid(tl.load(beta + token * beta_row + head).to(tl.float32))
        update = (v - tl.sum(held * k[None, :], 1)) * strength
        held = held + update[:, None] * k[None, :]
        result = tl.where(live, tl.sum(held * q[None, :], 1), 0.0)
        tl.store(out + (token * heads + head) * DV + value, result, mask=in_value)
        held = held.to(state.dtype.element_ty).to(tl.float32)
    tl.store(place, held.to(state.dtype.element_ty), mask=inside)


@launched(do_not_specialize=["heads"])
def _state_space(
    xbc, dt, a_log, d, dt_bias, state, out, query_start, blocks, heads, least, most, xbc_row: tl.int64, dt_row: tl.int64,
    state_block: tl.int64, SHARE: tl.constexpr, SIZE: tl.constexpr, SIZE_P: tl.constexpr, WIDTH: tl.constexpr,
    VALUES: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """``VALUES`` rows of a head's state; SHARE heads have one group's b and c."""
    begin(PDL)
    head, row = tl.program_id(1), tl.program_id(2)
    value = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    channel = tl.arange(0, SIZE_P)
    in_value, in_size = value < WIDTH, channel < SIZE
    block = tl.load(blocks + row).to(tl.int64)
    live = block >= 0
    place = state + tl.maximum(block, 0) * state_block + (head * WIDTH + value[:, None]) * SIZE + channel[None, :]
    inside = in_value[:, None] & in_size[None, :] & live
    held = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    rate, added, factor = -tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head), tl.load(d + head)
    own = heads * WIDTH + head // SHARE * SIZE + channel
    for token in range(tl.load(query_start + row).to(tl.int64), tl.load(query_start + row + 1).to(tl.int64)):
        x = tl.load(xbc + token * xbc_row + head * WIDTH + value, mask=in_value, other=0.0).to(tl.float32)
        b = tl.load(xbc + token * xbc_row + own, mask=in_size, other=0.0).to(tl.float32)
        c = tl.load(xbc + token * xbc_row + heads // SHARE * SIZE + own, mask=in_size, other=0.0).to(tl.float32)
        delta = softplus(tl.load(dt + token * dt_row + head).to(tl.float32) + added)
        delta = tl.minimum(tl.maximum(delta, least), most)
        held = held * tl.exp(rate * delta) + (delta * x)[:, None] * b[None, :]
        result = tl.where(live, tl.sum(held * c[None, :], 1) + factor * x, 0.0)
        tl.store(out + (token * heads + head) * WIDTH + value, result, mask=in_value)
        held = held.to(state.dtype.element_ty).to(tl.float32)
    tl.store(place, held.to(state.dtype.element_ty), mask=inside)


@launched(do_not_specialize=["count", "groups"])
def _gated_norm(
    x, z, weight, out, count, groups, eps, z_row: tl.int64, WIDTH: tl.constexpr, WIDTH_P: tl.constexpr, AT_ONCE: tl.constexpr,
    SHARED: tl.constexpr, SIGMOID: tl.constexpr, GATE_FIRST: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """``AT_ONCE`` of the tokens' groups of ``WIDTH`` channels. SHARED: all groups of a token have one weight."""
    begin(PDL)
    place = tl.program_id(0) * AT_ONCE + tl.arange(0, AT_ONCE)
    token, group = (place // groups).to(tl.int64)[:, None], (place % groups)[:, None]
    channel = tl.arange(0, WIDTH_P)[None, :]
    mask = (place < count)[:, None] & (channel < WIDTH)
    own = place.to(tl.int64)[:, None] * WIDTH + channel
    value = tl.load(x + own, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(z + token * z_row + group * WIDTH + channel, mask=mask, other=0.0).to(tl.float32)
    if SHARED:
        factor = tl.load(weight + channel, mask=channel < WIDTH, other=0.0).to(tl.float32)
    else:
        factor = tl.load(weight + group * WIDTH + channel, mask=mask, other=0.0).to(tl.float32)
    opened = tl.sigmoid(gate)
    if not SIGMOID:
        opened = gate * opened
    if GATE_FIRST:
        value = value * opened
    normed = value * tl.rsqrt(tl.sum(value * value, 1) / WIDTH + eps)[:, None] * factor
    if not GATE_FIRST:
        normed = normed * opened
    tl.store(out + own, normed.to(out.dtype.element_ty), mask=mask)


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Literal["silu"] | None,
    cache: torch.Tensor,
    step: StateMetadata,
) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.state.causal_conv``."""
    x, weight = token_rows(x), weight.contiguous()
    out = outputs(step, len(x), len(weight), x.dtype, x.device)
    if step.decode_rows and len(x):
        _convolve_rows(x, weight, bias, activation, cache, step, out)
    if step.prompt_rows and len(x):
        convolve_prompts(x, weight, bias, activation, cache, step, out)
    return out


def outputs(step: StateMetadata, tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A place for the results of a step's rows. Those of tokens of no row are zeros."""
    empty = torch.zeros if step.padded and step.prompt_rows else torch.empty
    return empty(tokens, width, dtype=dtype, device=device)


def _convolve_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Literal["silu"] | None,
    cache: torch.Tensor,
    step: StateMetadata,
    out: torch.Tensor,
) -> None:
    (channels, taps), rows = weight.shape, step.decode_rows
    tile, at_once = _FEW_TILE if rows <= _FEW else _TILE
    _conv_rows[(cdiv(channels, tile), cdiv(rows, at_once))](
        x, weight, weight if bias is None else bias, cache, out, step.blocks, step.starts, rows, channels, x.stride(0),
        cache.stride(0), TAPS=taps, CHANNELS=tile, ROWS=at_once, BIAS=bias is not None, SILU=activation == "silu",
        MODE=mode(x.device), num_warps=4, **options(x.device),
    )  # fmt: skip


def delta_rule(
    qkv: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    step: StateMetadata,
    beta_factor: int = 1,
    pending: Pending | None = None,
) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.state.delta_rule``."""
    heads, value_dim, key_dim = state.shape[1:]
    by_token = step.by_token or decay.shape[1] > heads
    qkv, decay, beta = token_rows(qkv), token_rows(decay), token_rows(beta)
    # Readouts may be beyond float16; bfloat16 has float32's range.
    dtype = torch.float32 if qkv.dtype == torch.float16 else qkv.dtype
    out = outputs(step, len(qkv), heads * value_dim, dtype, qkv.device)
    if not len(qkv):
        return out
    if step.prompt_rows and not by_token:
        delta_prompts(qkv, decay, beta, a_log, dt_bias, state, step, beta_factor, pending, out)
    if pending is not None:
        if step.decode_rows:
            delta_rows(qkv, decay, beta, a_log, dt_bias, state, step, beta_factor, pending, out)
        return out
    rows = step.num_rows if by_token else step.decode_rows
    if not rows:
        return out
    values = min(_VALUES, power_of_two(value_dim))
    _delta_rule[(cdiv(value_dim, values), heads, rows)](
        qkv, decay, beta, a_log, dt_bias, state, out, step.query_start, step.blocks, heads, float(beta_factor), key_dim**-0.5,
        qkv.stride(0), decay.stride(0), beta.stride(0), state.stride(0),
        SHARE=2 * heads * key_dim // (qkv.shape[1] - heads * value_dim), DK=key_dim, DK_P=power_of_two(key_dim), DV=value_dim,
        VALUES=values, BY_CHANNEL=decay.shape[1] > heads, EARLY=step.decode_rows <= _EARLY_ROWS and not step.prompt_rows,
        num_warps=_WARPS, **options(qkv.device),
    )  # fmt: skip
    return out


def state_space(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    step: StateMetadata,
    dt_limit: tuple[float, float] = (0.0, math.inf),
) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.state.state_space``."""
    heads, width, size = state.shape[1:]
    xbc, dt = token_rows(xbc), token_rows(dt)
    out = outputs(step, len(xbc), heads * width, torch.float32, xbc.device)
    if not len(xbc):
        return out
    if step.prompt_rows and not step.by_token:
        space_prompts(xbc, dt, a_log, d, dt_bias, state, step, dt_limit, out)
    rows = step.num_rows if step.by_token else step.decode_rows
    if not rows:
        return out
    values = min(_VALUES, power_of_two(width))
    _state_space[(cdiv(width, values), heads, rows)](
        xbc, dt, a_log, d, dt_bias, state, out, step.query_start, step.blocks, heads, *map(float, dt_limit), xbc.stride(0),
        dt.stride(0), state.stride(0), SHARE=2 * heads * size // (xbc.shape[1] - heads * width), SIZE=size,
        SIZE_P=power_of_two(size), WIDTH=width, VALUES=values, num_warps=_WARPS, **options(xbc.device),
    )  # fmt: skip
    return out


def gated_norm(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    width: int,
    gate: Gate = "silu",
    *,
    gate_first: bool = False,
) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.state.gated_norm``."""
    x, z = x.contiguous(), token_rows(z)
    out = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    if not len(z):
        return out
    groups, width_p = z.shape[1] // width, power_of_two(width)
    count, at_once = len(z) * groups, max(_NORMED // width_p, 1)
    _gated_norm[(cdiv(count, at_once),)](
        x, z, weight, out, count, groups, eps, z.stride(0), WIDTH=width, WIDTH_P=width_p, AT_ONCE=at_once,
        SHARED=weight.numel() == width, SIGMOID=gate == "sigmoid", GATE_FIRST=gate_first,
        num_warps=min(max(width_p // 256, 4), 16), **options(z.device),
    )  # fmt: skip
    return out
