"""State layers token by token, the states in registers. References: ``headrace.kernels.state.reference``.

A program has a part of one row's state and absorbs the row's tokens in order, so that no result depends on how a sequence is
cut into steps, or on other rows. Launches depend on the numbers of rows and of a row's tokens alone.
"""

# A kernel's arguments have no types of Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from headrace.kernels.state.metadata import StateMetadata
from headrace.kernels.state.reference import Gate
from headrace.kernels.support import cdiv, power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import begin, options

_CHANNELS = 128
"""Channels of a convolution of one program."""
_CHUNK = 32
"""Tokens of a convolution of one program."""
_SCANNED = 32
"""Channels of Mamba-1 of one program."""
_VALUES = 8
"""Rows of a head's state of one program, at most."""
_WARPS = 1
"""Warps of such a program. With one, no token waits for others to add up."""


@triton.jit
def _softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@launched(do_not_specialize=["channels"])
def _causal_conv(
    x,
    weight,
    bias,
    cache,
    out,
    query_start,  # [R + 1] int32
    blocks,  # [R] int32
    starts,  # [R] int32
    channels,
    x_row: tl.int64,
    cache_block: tl.int64,
    TAPS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHANNELS: tl.constexpr,
    BIAS: tl.constexpr,
    SILU: tl.constexpr,
    KEEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """``CHUNK`` tokens of a row. KEEP: rows have no more, and their inputs are kept; else ``_keep_inputs`` keeps them."""
    begin(PDL)
    row = tl.program_id(2)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    mask = channel < channels
    block = tl.load(blocks + row).to(tl.int64)
    live = block >= 0
    ring = cache + tl.maximum(block, 0) * cache_block + channel
    start = tl.load(starts + row)
    first = tl.load(query_start + row).to(tl.int64)
    count = (tl.load(query_start + row + 1) - first).to(tl.int32)
    begins = tl.program_id(1) * CHUNK
    for offset in range(begins, tl.minimum(begins + CHUNK, count)):
        total = tl.zeros((CHANNELS,), tl.float32)
        now = x + (first + offset) * x_row + channel
        for tap in tl.static_range(TAPS):
            back = TAPS - 1 - tap
            factor = tl.load(weight + channel.to(tl.int64) * TAPS + tap, mask=mask, other=0.0).to(tl.float32)
            fresh = tl.load(now - back * x_row, mask=mask & (offset >= back), other=0.0).to(tl.float32)
            if back == 0:
                total += fresh * factor
            else:
                place = (start + offset - back + TAPS - 1) % (TAPS - 1)
                old = tl.load(ring + place * channels, mask=mask & live & (offset < back), other=0.0).to(tl.float32)
                total += (fresh + old) * factor
        if BIAS:
            total += tl.load(bias + channel, mask=mask, other=0.0).to(tl.float32)
        if SILU:
            total = total * tl.sigmoid(total)
        value = tl.where(live, total, 0.0).to(out.dtype.element_ty)
        tl.store(out + (first + offset) * channels + channel, value, mask=mask)
        if KEEP:
            place = (start + offset) % (TAPS - 1)
            tl.store(ring + place * channels, tl.load(now, mask=mask, other=0.0), mask=mask & live)


@launched(do_not_specialize=["channels"])
def _keep_inputs(
    x,
    cache,
    query_start,  # [R + 1] int32
    blocks,  # [R] int32
    starts,  # [R] int32
    channels,
    x_row: tl.int64,
    cache_block: tl.int64,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Keeps the last ``TAPS - 1`` inputs of each row."""
    begin(PDL)
    row = tl.program_id(1)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    block = tl.load(blocks + row).to(tl.int64)
    ring = cache + tl.maximum(block, 0) * cache_block + channel
    start = tl.load(starts + row)
    first = tl.load(query_start + row).to(tl.int64)
    count = (tl.load(query_start + row + 1) - first).to(tl.int32)
    mask = (channel < channels) & (block >= 0)
    for offset in range(tl.maximum(count - TAPS + 1, 0), count):
        value = tl.load(x + (first + offset) * x_row + channel, mask=mask, other=0.0)
        tl.store(ring + (start + offset) % (TAPS - 1) * channels, value, mask=mask)


@launched(do_not_specialize=["heads"])
def _delta_rule(
    qkv,
    decay,
    beta,
    a_log,
    dt_bias,
    state,
    out,
    query_start,  # [R + 1] int32
    blocks,  # [R] int32
    heads,
    beta_factor,
    scale,
    qkv_row: tl.int64,
    decay_row: tl.int64,
    beta_row: tl.int64,
    state_block: tl.int64,
    SHARE: tl.constexpr,
    DK: tl.constexpr,
    DK_P: tl.constexpr,
    DV: tl.constexpr,
    VALUES: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    PDL: tl.constexpr,
):
    """``VALUES`` rows of a head's state; SHARE heads have one key head."""
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
    for token in range(tl.load(query_start + row).to(tl.int64), tl.load(query_start + row + 1).to(tl.int64)):
        q = tl.load(qkv + token * qkv_row + own, mask=in_key, other=0.0).to(tl.float32)
        k = tl.load(qkv + token * qkv_row + keys + own, mask=in_key, other=0.0).to(tl.float32)
        v = tl.load(qkv + token * qkv_row + 2 * keys + head * DV + value, mask=in_value, other=0.0).to(tl.float32)
        q = q * tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
        k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
        if BY_CHANNEL:
            fade = tl.load(decay + token * decay_row + head * DK + channel, mask=in_key, other=0.0).to(tl.float32)
            held = held * tl.exp(rate * _softplus(fade + added))[None, :]
        else:
            held = held * tl.exp(rate * _softplus(tl.load(decay + token * decay_row + head).to(tl.float32) + added))
        strength = beta_factor * tl.sigmoid(tl.load(beta + token * beta_row + head).to(tl.float32))
        update = (v - tl.sum(held * k[None, :], 1)) * strength
        held = held + update[:, None] * k[None, :]
        result = tl.where(live, tl.sum(held * q[None, :], 1), 0.0)
        tl.store(out + (token * heads + head) * DV + value, result, mask=in_value)
        held = held.to(state.dtype.element_ty).to(tl.float32)
    tl.store(place, held.to(state.dtype.element_ty), mask=inside)


@launched(do_not_specialize=["heads"])
def _state_space(
    xbc,
    dt,
    a_log,
    d,
    dt_bias,
    state,
    out,
    query_start,  # [R + 1] int32
    blocks,  # [R] int32
    heads,
    least,
    most,
    xbc_row: tl.int64,
    dt_row: tl.int64,
    state_block: tl.int64,
    SHARE: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_P: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    PDL: tl.constexpr,
):
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
        delta = _softplus(tl.load(dt + token * dt_row + head).to(tl.float32) + added)
        delta = tl.minimum(tl.maximum(delta, least), most)
        held = held * tl.exp(rate * delta) + (delta * x)[:, None] * b[None, :]
        result = tl.where(live, tl.sum(held * c[None, :], 1) + factor * x, 0.0)
        tl.store(out + (token * heads + head) * WIDTH + value, result, mask=in_value)
        held = held.to(state.dtype.element_ty).to(tl.float32)
    tl.store(place, held.to(state.dtype.element_ty), mask=inside)


@launched(do_not_specialize=["channels"])
def _selective_scan(
    x,
    dt,
    b,
    c,
    rate,
    d,
    dt_bias,
    state,
    out,
    query_start,
    blocks,
    channels,
    x_row: tl.int64,
    dt_row: tl.int64,
    b_row: tl.int64,
    c_row: tl.int64,
    state_block: tl.int64,
    SIZE: tl.constexpr,
    SIZE_P: tl.constexpr,
    CHANNELS: tl.constexpr,
    PDL: tl.constexpr,
):
    """``CHANNELS`` channels of a row."""
    begin(PDL)
    row = tl.program_id(1)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    number = tl.arange(0, SIZE_P)
    present, in_size = channel < channels, number < SIZE
    inside = present[:, None] & in_size[None, :]
    block = tl.load(blocks + row).to(tl.int64)
    live = block >= 0
    at = channel[:, None] * SIZE + number[None, :]
    place = state + tl.maximum(block, 0) * state_block + at
    held = tl.load(place, mask=inside & live, other=0.0).to(tl.float32)
    rates = tl.load(rate + at, mask=inside, other=0.0)
    added, factor = tl.load(dt_bias + channel, mask=present, other=0.0), tl.load(d + channel, mask=present, other=0.0)
    for token in range(tl.load(query_start + row).to(tl.int64), tl.load(query_start + row + 1).to(tl.int64)):
        value = tl.load(x + token * x_row + channel, mask=present, other=0.0).to(tl.float32)
        delta = _softplus(tl.load(dt + token * dt_row + channel, mask=present, other=0.0).to(tl.float32) + added)
        write = tl.load(b + token * b_row + number, mask=in_size, other=0.0).to(tl.float32)
        read = tl.load(c + token * c_row + number, mask=in_size, other=0.0).to(tl.float32)
        held = held * tl.exp(rates * delta[:, None]) + (delta * value)[:, None] * write[None, :]
        result = tl.where(live, tl.sum(held * read[None, :], 1) + factor * value, 0.0)
        tl.store(out + token * channels + channel, result, mask=present)
        held = held.to(state.dtype.element_ty).to(tl.float32)
    tl.store(place, held.to(state.dtype.element_ty), mask=inside & live)


@launched(do_not_specialize=["channels"])
def _gated_norm(
    x,
    z,
    weight,
    out,
    channels,
    eps,
    z_row: tl.int64,
    WIDTH: tl.constexpr,
    WIDTH_P: tl.constexpr,
    SHARED: tl.constexpr,
    SIGMOID: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    PDL: tl.constexpr,
):
    """``WIDTH`` channels of a token. SHARED: all groups of channels have one weight."""
    begin(PDL)
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH
    channel = tl.arange(0, WIDTH_P)
    mask = channel < WIDTH
    value = tl.load(x + token * channels + first + channel, mask=mask, other=0.0)
    gate = tl.load(z + token * z_row + first + channel, mask=mask, other=0.0).to(tl.float32)
    factor = tl.load(weight + (0 if SHARED else first) + channel, mask=mask, other=0.0).to(tl.float32)
    opened = tl.sigmoid(gate)
    if not SIGMOID:
        opened = gate * opened
    if GATE_FIRST:
        value = value * opened
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps) * factor
    if not GATE_FIRST:
        normed = normed * opened
    tl.store(out + token * channels + first + channel, normed.to(out.dtype.element_ty), mask=mask)


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Literal["silu"] | None,
    cache: torch.Tensor,
    step: StateMetadata,
) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.state.causal_conv``."""
    x, weight = _rows(x), weight.contiguous()
    channels, taps = weight.shape
    out = torch.empty(len(x), channels, dtype=x.dtype, device=x.device)
    if not len(x):
        return out
    rows = step.query_start, step.blocks, step.starts
    tiles, chunks = cdiv(channels, _CHANNELS), cdiv(step.longest, _CHUNK)
    _causal_conv[(tiles, chunks, step.num_rows)](
        x,
        weight,
        weight if bias is None else bias,
        cache,
        out,
        *rows,
        channels,
        x.stride(0),
        cache.stride(0),
        TAPS=taps,
        CHUNK=_CHUNK,
        CHANNELS=_CHANNELS,
        BIAS=bias is not None,
        SILU=activation == "silu",
        KEEP=chunks == 1,
        num_warps=4,
        **options(x.device),
    )
    if chunks > 1:
        _keep_inputs[(tiles, step.num_rows)](
            x,
            cache,
            *rows,
            channels,
            x.stride(0),
            cache.stride(0),
            TAPS=taps,
            CHANNELS=_CHANNELS,
            num_warps=4,
            **options(x.device),
        )
    return out


def delta_rule(
    qkv: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    step: StateMetadata,
    beta_factor: int = 1,
) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.state.delta_rule``."""
    heads, value_dim, key_dim = state.shape[1:]
    qkv, decay, beta = _rows(qkv), _rows(decay), _rows(beta)
    out = torch.empty(len(qkv), heads * value_dim, dtype=torch.float32, device=qkv.device)
    if not len(qkv):
        return out
    values = min(_VALUES, power_of_two(value_dim))
    _delta_rule[(cdiv(value_dim, values), heads, step.num_rows)](
        qkv,
        decay,
        beta,
        a_log,
        dt_bias,
        state,
        out,
        step.query_start,
        step.blocks,
        heads,
        float(beta_factor),
        key_dim**-0.5,
        qkv.stride(0),
        decay.stride(0),
        beta.stride(0),
        state.stride(0),
        SHARE=2 * heads * key_dim // (qkv.shape[1] - heads * value_dim),
        DK=key_dim,
        DK_P=power_of_two(key_dim),
        DV=value_dim,
        VALUES=values,
        BY_CHANNEL=decay.shape[1] > heads,
        num_warps=_WARPS,
        **options(qkv.device),
    )
    return out


def state_space(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    step: StateMetadata,
    dt_limit: tuple[float, float],
) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.state.state_space``."""
    heads, width, size = state.shape[1:]
    xbc, dt = _rows(xbc), _rows(dt)
    out = torch.empty(len(xbc), heads * width, dtype=torch.float32, device=xbc.device)
    if not len(xbc):
        return out
    values = min(_VALUES, power_of_two(width))
    _state_space[(cdiv(width, values), heads, step.num_rows)](
        xbc,
        dt,
        a_log,
        d,
        dt_bias,
        state,
        out,
        step.query_start,
        step.blocks,
        heads,
        *map(float, dt_limit),
        xbc.stride(0),
        dt.stride(0),
        state.stride(0),
        SHARE=2 * heads * size // (xbc.shape[1] - heads * width),
        SIZE=size,
        SIZE_P=power_of_two(size),
        WIDTH=width,
        VALUES=values,
        num_warps=_WARPS,
        **options(xbc.device),
    )
    return out


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    rate: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    step: StateMetadata,
) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.state.selective_scan``."""
    x, dt, b, c = _rows(x), _rows(dt), _rows(b), _rows(c)
    channels, size = rate.shape
    out = torch.empty(len(x), channels, dtype=torch.float32, device=x.device)
    if not len(x):
        return out
    tile = min(_SCANNED, power_of_two(channels))
    _selective_scan[(cdiv(channels, tile), step.num_rows)](
        x,
        dt,
        b,
        c,
        rate.contiguous(),
        d,
        dt_bias,
        state,
        out,
        step.query_start,
        step.blocks,
        channels,
        x.stride(0),
        dt.stride(0),
        b.stride(0),
        c.stride(0),
        state.stride(0),
        SIZE=size,
        SIZE_P=power_of_two(size),
        CHANNELS=tile,
        num_warps=_WARPS,
        **options(x.device),
    )
    return out


def gated_norm(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, width: int, gate: Gate, gate_first: bool
) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.state.gated_norm``."""
    x, z = x.contiguous(), _rows(z)
    out = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    if not len(z):
        return out
    channels, width_p = z.shape[1], power_of_two(width)
    _gated_norm[(len(z), channels // width)](
        x,
        z,
        weight,
        out,
        channels,
        eps,
        z.stride(0),
        WIDTH=width,
        WIDTH_P=width_p,
        SHARED=weight.numel() == width,
        SIGMOID=gate == "sigmoid",
        GATE_FIRST=gate_first,
        num_warps=min(max(width_p // 256, 1), 16),
        **options(z.device),
    )
    return out


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x with the channels of a token side by side: it may be a slice of wider rows."""
    return x if x.stride(1) == 1 else x.contiguous()
