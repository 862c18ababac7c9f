"""The gated delta rule between its projections, in one launch for decode rows.

A program has one key head of a row, and the heads that share it: no other program reads the inputs of a convolution that it
replaces by newer ones. Each state is read once and written once.
"""

# A kernel's arguments have no types of Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton.language as tl

from headrace.kernels.state.metadata import StateMetadata
from headrace.kernels.state.reference import DeltaWeights
from headrace.kernels.state.triton import convolve_prompts, convolved, norm_gated, outputs
from headrace.kernels.state.triton_tiles import delta_prompts, softplus
from headrace.kernels.support import power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import begin, options


@launched(do_not_specialize=["heads", "channels"])
def _delta_mixer(
    x,
    z,
    decay,
    beta,
    weight,
    a_log,
    dt_bias,
    norm,
    cache,
    state,
    out,
    query_start,  # [R + 1] int32
    blocks,  # [R] int32
    starts,  # [R] int32
    heads,
    channels,
    beta_factor,
    scale,
    eps,
    x_row: tl.int64,
    z_row: tl.int64,
    decay_row: tl.int64,
    beta_row: tl.int64,
    cache_block: tl.int64,
    state_block: tl.int64,
    SHARE: tl.constexpr,
    TAPS: tl.constexpr,
    DK: tl.constexpr,
    DK_P: tl.constexpr,
    DV: tl.constexpr,
    DV_P: tl.constexpr,
    SIGMOID: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    key_head, row = tl.program_id(0), tl.program_id(1)
    channel, value = tl.arange(0, DK_P), tl.arange(0, DV_P)
    in_key, in_value = channel < DK, value < DV
    block = tl.load(blocks + row).to(tl.int64)
    live = block >= 0
    ring = cache + tl.maximum(block, 0) * cache_block
    token, start = tl.load(query_start + row).to(tl.int64), tl.load(starts + row)
    newest = ring + start % (TAPS - 1) * channels
    now = x + token * x_row
    own, keys = key_head * DK + channel, heads // SHARE * DK
    unit = in_key & live
    # As the convolution of prompts, rounded to its dtype.
    q = convolved(x, x_row, weight, weight, ring, token, start, 0, own, unit, channels, TAPS, False, True)
    k = convolved(x, x_row, weight, weight, ring, token, start, 0, keys + own, unit, channels, TAPS, False, True)
    new_q = tl.load(now + own, mask=unit, other=0.0)
    new_k = tl.load(now + keys + own, mask=unit, other=0.0)
    # All threads have read the ring.
    tl.debug_barrier()
    tl.store(newest + own, new_q, mask=unit)
    tl.store(newest + keys + own, new_k, mask=unit)
    q, k = q.to(x.dtype.element_ty).to(tl.float32), k.to(x.dtype.element_ty).to(tl.float32)
    q = q * tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
    k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
    match = tl.sum(q * k, 0)
    factor = tl.load(norm + value, mask=in_value, other=0.0).to(tl.float32)
    for share in range(SHARE):
        head = key_head * SHARE + share
        place = state + tl.maximum(block, 0) * state_block + (head * DV + value[:, None]) * DK + channel[None, :]
        whole = in_value[:, None] & in_key[None, :] & live
        held = tl.load(place, mask=whole, other=0.0).to(tl.float32)
        part, mine = 2 * keys + head * DV + value, in_value & live
        v = convolved(x, x_row, weight, weight, ring, token, start, 0, part, mine, channels, TAPS, False, True)
        new_v = tl.load(now + part, mask=mine, other=0.0)
        tl.debug_barrier()
        tl.store(newest + part, new_v, mask=mine)
        v = v.to(x.dtype.element_ty).to(tl.float32)
        fade = tl.load(decay + token * decay_row + head).to(tl.float32) + tl.load(dt_bias + head)
        fade = tl.exp(-tl.exp(tl.load(a_log + head)) * softplus(fade))
        strength = beta_factor * tl.sigmoid(tl.load(beta + token * beta_row + head).to(tl.float32))
        update = strength * (v - fade * tl.sum(held * k[None, :], 1))
        result = fade * tl.sum(held * q[None, :], 1) + match * update
        held = fade * held + update[:, None] * k[None, :]
        tl.store(place, held.to(state.dtype.element_ty), mask=whole)
        gate = tl.load(z + token * z_row + head * DV + value, mask=mine, other=0.0).to(tl.float32)
        opened = tl.sigmoid(gate)
        if not SIGMOID:
            opened = gate * opened
        normed = result * tl.rsqrt(tl.sum(result * result, 0) / DV + eps) * factor * opened
        normed = tl.where(live, normed, 0.0).to(out.dtype.element_ty)
        tl.store(out + (token * heads + head) * DV + value, normed, mask=in_value)


def delta_mixer(
    x: torch.Tensor,
    z: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    weights: DeltaWeights,
    cache: torch.Tensor,
    state: torch.Tensor,
    step: StateMetadata,
) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.state.delta_mixer``, where prompts are not absorbed token by token and a decay is
    that of a whole head. The channels of each input lie side by side."""
    heads, value_dim, key_dim = state.shape[1:]
    tokens, inner = len(x), heads * value_dim
    out = outputs(step, tokens, inner, z.dtype, z.device)
    if step.prompt_rows and tokens:
        _prompts(x, z, decay, beta, weights, cache, state, step, out)
    if step.decode_rows and tokens:
        share = 2 * heads * key_dim // (x.shape[1] - inner)
        _delta_mixer[(heads // share, step.decode_rows)](
            x,
            z,
            decay,
            beta,
            weights.conv,
            weights.a_log,
            weights.dt_bias,
            weights.norm,
            cache,
            state,
            out,
            step.query_start,
            step.blocks,
            step.starts,
            heads,
            x.shape[1],
            float(weights.beta_factor),
            key_dim**-0.5,
            weights.eps,
            x.stride(0),
            z.stride(0),
            decay.stride(0),
            beta.stride(0),
            cache.stride(0),
            state.stride(0),
            SHARE=share,
            TAPS=weights.conv.shape[1],
            DK=key_dim,
            DK_P=power_of_two(key_dim),
            DV=value_dim,
            DV_P=power_of_two(value_dim),
            SIGMOID=weights.gate == "sigmoid",
            num_warps=_warps(key_dim, value_dim),
            **options(x.device),
        )
    return out


def _prompts(
    x: torch.Tensor,
    z: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    weights: DeltaWeights,
    cache: torch.Tensor,
    state: torch.Tensor,
    step: StateMetadata,
    out: torch.Tensor,
) -> None:
    qkv = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    convolve_prompts(x, weights.conv, None, "silu", cache, step, qkv)
    mixed = torch.empty_like(out) if not step.padded else torch.zeros_like(out)
    delta_prompts(qkv, decay, beta, weights.a_log, weights.dt_bias, state, step, weights.beta_factor, mixed)
    first = step.decode_rows
    norm_gated(mixed[first:], z[first:], weights.norm, weights.eps, state.shape[2], weights.gate, False, out[first:])


def _warps(key_dim: int, value_dim: int) -> int:
    """So many that a thread has 64 numbers of a state."""
    return min(max(power_of_two(key_dim) * power_of_two(value_dim) // (64 * 32), 1), 16)
