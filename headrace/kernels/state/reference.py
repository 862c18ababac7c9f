"""Layers with a state in plain PyTorch, token by token: results do not depend on how a sequence is cut into steps.

Every tensor operation is of one token, so that vector code meets each number at the same place whatever else is in the step.
Sums are taken in float32, or in float64 where the inputs are.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch.nn.functional import silu, softplus

from headrace.kernels.state.metadata import Pending, StateMetadata

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
    """Causal depthwise convolution: ``out[t, c] = act(sum_j weight[c, j] * x[t - K + 1 + j, c] + bias[c])``.

    Args:
        x: ``[T, C]``
        weight: ``[C, K]``: the last tap multiplies the current token.
        bias: ``[C]``
        cache: ``[blocks, K - 1, C]`` in x's dtype: the last inputs of each sequence, that of position p in row ``p % (K - 1)``.

    Returns:
        ``[T, C]`` in x's dtype.
    """
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
    pending: Pending | None = None,
) -> torch.Tensor:
    """The gated delta rule (Yang et al., 2024), and with a decay for each key channel Kimi's. For each token, in each head::

        S = S * exp(-exp(a_log) * softplus(decay + dt_bias))
        S = S + beta_factor * sigmoid(beta) * outer(v - S @ k, k)
        out = S @ q / sqrt(key_dim)

    where q and k have been scaled to length 1.

    Args:
        qkv: ``[T, key_heads * key_dim * 2 + heads * value_dim]``, convolved: q, k and v. Consecutive heads share a key head.
        decay: ``[T, heads]``, or ``[T, heads * key_dim]``
        beta: ``[T, heads]``
        a_log: ``[heads]`` float32
        dt_bias: one for each of ``decay``'s channels, float32.
        state: ``[blocks, heads, value_dim, key_dim]``
        pending: on a GPU, the tokens that states lack, since only some steps write them; None: each step writes them. Not for
            steps that absorb prompts token by token, or decays of channels.

    Returns:
        ``[T, heads * value_dim]`` float32; on a GPU, where prompts read and write it at the pace of memory, bfloat16 if qkv is.
    """
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
    """Mamba-2's recurrence (Dao and Gu, 2024). For each token, in each head::

        delta = clamp(softplus(dt + dt_bias), *dt_limit)
        S = S * exp(-exp(a_log) * delta) + outer(delta * x, b)
        out = S @ c + d * x

    Args:
        xbc: ``[T, heads * width + 2 * groups * size]``, convolved: x, b and c. Consecutive heads share a group's b and c.
        dt: ``[T, heads]``
        a_log, d, dt_bias: ``[heads]`` float32
        state: ``[blocks, heads, width, size]``

    Returns:
        ``[T, heads * width]`` float32.
    """
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


def selective_scan_ref(
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
    """Mamba-1's recurrence (Gu and Dao, 2023). For each token, in each channel::

        delta = softplus(dt + dt_bias)
        s = s * exp(rate * delta) + delta * x * b
        out = sum(s * c) + d * x

    Args:
        x, dt: ``[T, channels]``
        b, c: ``[T, size]``
        rate: ``[channels, size]`` float32, below 0.
        d, dt_bias: ``[channels]`` float32
        state: ``[blocks, channels, 1, size]``

    Returns:
        ``[T, channels]`` float32.
    """
    out = torch.zeros(x.shape, dtype=_wide(x).dtype, device=x.device)
    for row in step.live_rows():
        held = _wide(state[row.block, :, 0])
        for token in range(row.first, row.first + row.tokens):
            value = _wide(x[token])
            delta = softplus(_wide(dt[token]) + _wide(dt_bias))
            held = held * (_wide(rate) * delta[:, None]).exp() + (delta * value)[:, None] * _wide(b[token])
            out[token] = (held * _wide(c[token])).sum(-1) + _wide(d) * value
            held = _wide(held.to(state.dtype))
        state[row.block, :, 0] = held.to(state.dtype)
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
    """RMS norm of each ``width`` channels, times the gate of z; or of what has been multiplied by the gate.

    Args:
        x: ``[T, n]`` float32
        z: ``[T, n]``
        weight: ``[width]``, or ``[n]``

    Returns:
        ``[T, n]`` in z's dtype, rounded once.
    """
    groups = (len(x), -1, width)
    wide, opened = _wide(x).reshape(groups), _wide(z).reshape(groups)
    opened = silu(opened) if gate == "silu" else torch.sigmoid(opened)
    if gate_first:
        wide = wide * opened
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * _wide(weight).view(-1, width)
    return (normed if gate_first else normed * opened).view(len(x), -1).to(z.dtype)
