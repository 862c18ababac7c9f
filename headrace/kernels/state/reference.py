"""Layers with a state in plain PyTorch, token by token: results do not depend on how a sequence is cut into steps.

Every tensor operation is of one token, so that vector code meets each number at the same place whatever else is in the step.
Sums are taken in float32, or in float64 where the inputs are.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch.nn.functional import silu, softplus

from headrace.kernels.state.metadata import StateMetadata

Gate = Literal["silu", "sigmoid"]
_L2_EPS = 1e-6


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def causal_conv_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Literal["silu"] | None,
    cache: torch.Tensor,
    step: StateMetadata,
) -> torch.Tensor:
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    wide = _wide(weight)
    taps = weight.shape[1]
    for row in step.live_rows():
        ring = cache[row.block]
        for offset in range(row.tokens):
            position, token = row.start + offset, row.first + offset
            total = _wide(ring[position % (taps - 1)]) * wide[:, 0]
            for tap in range(1, taps - 1):
                total += _wide(ring[(position + tap) % (taps - 1)]) * wide[:, tap]
            total += _wide(x[token]) * wide[:, -1]
            if bias is not None:
                total += _wide(bias)
            out[token] = silu(total) if activation == "silu" else total
            ring[position % (taps - 1)] = x[token]
    return out


def delta_rule_ref(
    qkv: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    step: StateMetadata,
    beta_factor: int = 1,
) -> torch.Tensor:
    heads, value_dim, key_dim = state.shape[1:]
    keys = (qkv.shape[1] - heads * value_dim) // 2
    shared = heads * key_dim // keys
    factor = -_wide(a_log).exp()[:, None]
    out = torch.zeros(len(qkv), heads * value_dim, dtype=_wide(qkv).dtype, device=qkv.device)
    for row in step.live_rows():
        held = _wide(state[row.block])
        for token in range(row.first, row.first + row.tokens):
            q, k, v = _wide(qkv[token]).split_with_sizes([keys, keys, heads * value_dim])
            q, k = (_unit(each.view(-1, key_dim)).repeat_interleave(shared, dim=0) for each in (q, k))
            fade = factor * softplus(_wide(decay[token]) + _wide(dt_bias)).view(heads, -1)
            held = held * fade.exp()[:, None, :]
            update = v.view(heads, value_dim) - (held * k[:, None, :]).sum(-1)
            update = update * (beta_factor * torch.sigmoid(_wide(beta[token])))[:, None]
            held = held + update[:, :, None] * k[:, None, :]
            out[token] = ((held * q[:, None, :]).sum(-1) * key_dim**-0.5).flatten()
            held = _wide(held.to(state.dtype))
        state[row.block] = held.to(state.dtype)
    return out


def _unit(heads: torch.Tensor) -> torch.Tensor:
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + _L2_EPS)


def state_space_ref(
    xbc: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    step: StateMetadata,
    dt_limit: tuple[float, float] = (0.0, math.inf),
) -> torch.Tensor:
    heads, width, size = state.shape[1:]
    inputs = (xbc.shape[1] - heads * width) // 2
    shared = heads * size // inputs
    factor = -_wide(a_log).exp()
    out = torch.zeros(len(xbc), heads * width, dtype=_wide(xbc).dtype, device=xbc.device)
    for row in step.live_rows():
        held = _wide(state[row.block])
        for token in range(row.first, row.first + row.tokens):
            x, b, c = _wide(xbc[token]).split_with_sizes([heads * width, inputs, inputs])
            x = x.view(heads, width)
            b, c = (each.view(-1, size).repeat_interleave(shared, dim=0) for each in (b, c))
            delta = softplus(_wide(dt[token]) + _wide(dt_bias)).clamp(*dt_limit)
            held = held * (factor * delta).exp()[:, None, None] + (delta[:, None] * x)[:, :, None] * b[:, None, :]
            out[token] = ((held * c[:, None, :]).sum(-1) + _wide(d)[:, None] * x).flatten()
            held = _wide(held.to(state.dtype))
        state[row.block] = held.to(state.dtype)
    return out


def gated_norm_ref(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    width: int,
    gate: Gate = "silu",
    *,
    gate_first: bool = False,
) -> torch.Tensor:
    groups = (len(x), -1, width)
    wide, opened = _wide(x).reshape(groups), _wide(z).reshape(groups)
    opened = silu(opened) if gate == "silu" else torch.sigmoid(opened)
    if gate_first:
        wide = wide * opened
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * _wide(weight).view(-1, width)
    return (normed if gate_first else normed * opened).view(len(x), -1).to(z.dtype)
