"""Layers with a state: causal convolutions and linear recurrences over packed rows, with the state of each row in a block.

Rows and their blocks are those of a ``StateMetadata``. All functions update the blocks in place, and give zeros for padding
rows. On a CPU results are bitwise the same however a sequence is cut into steps, and whatever other rows there are.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch

from headrace.kernels import gpu
from headrace.kernels.native.library import DTYPES, kernels_for
from headrace.kernels.state import native, reference
from headrace.kernels.state.metadata import Pending, StateMetadata, StateRow
from headrace.kernels.state.reference import Gate

if TYPE_CHECKING:
    from headrace.kernels.state import triton as kernels
    from headrace.kernels.state import triton_scan as scans
else:
    kernels = gpu.Late(f"{__name__}.triton")
    scans = gpu.Late(f"{__name__}.triton_scan")

__all__ = [
    "Gate",
    "Pending",
    "StateMetadata",
    "StateRow",
    "causal_conv",
    "delta_rule",
    "gated_conv",
    "gated_norm",
    "selective_scan",
    "state_space",
]


def causal_conv(
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
    if gpu.takes(x):
        return kernels.causal_conv(x, weight, bias, activation, cache, step)
    library = kernels_for(x)
    if library is not None and x.dtype == weight.dtype == cache.dtype:
        return native.causal_conv(library, x, weight, bias, activation, cache, step)
    return reference.causal_conv_ref(x, weight, bias, activation, cache, step)


def gated_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cache: torch.Tensor, step: StateMetadata
) -> torch.Tensor:
    """A causal convolution between two gates: ``c * causal_conv(b * v)``, where x has b, c and v, of C channels each.

    Args:
        x: ``[T, 3 * C]``; the rest as in ``causal_conv``.

    Returns:
        ``[T, C]`` in x's dtype.
    """
    library = kernels_for(x)
    if library is not None and x.dtype == weight.dtype == cache.dtype:
        return native.gated_conv(library, x, weight, bias, cache, step)
    gate, out_gate, values = x.chunk(3, dim=-1)
    return out_gate * causal_conv(gate * values, weight, bias, None, cache, step)


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
    if gpu.takes(qkv):
        return kernels.delta_rule(qkv, decay, beta, a_log, dt_bias, state, step, beta_factor, pending)
    library = kernels_for(qkv)
    if library is not None and state.dtype in DTYPES and qkv.dtype == decay.dtype == beta.dtype:
        return native.delta_rule(library, qkv, decay, beta, a_log, dt_bias, state, step, beta_factor)
    return reference.delta_rule_ref(qkv, decay, beta, a_log, dt_bias, state, step, beta_factor)


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
    if gpu.takes(xbc):
        return kernels.state_space(xbc, dt, a_log, d, dt_bias, state, step, dt_limit)
    library = kernels_for(xbc)
    if library is not None and state.dtype in DTYPES and xbc.dtype == dt.dtype:
        return native.state_space(library, xbc, dt, a_log, d, dt_bias, state, step, dt_limit)
    return reference.state_space_ref(xbc, dt, a_log, d, dt_bias, state, step, dt_limit)


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
    if gpu.takes(x):
        return scans.selective_scan(x, dt, b, c, rate, d, dt_bias, state, step)
    library = kernels_for(x)
    if library is not None and state.dtype in DTYPES and x.dtype == dt.dtype == b.dtype == c.dtype:
        return native.selective_scan(library, x, dt, b, c, rate, d, dt_bias, state, step)
    return reference.selective_scan_ref(x, dt, b, c, rate, d, dt_bias, state, step)


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
    """RMS norm of each ``width`` channels, times the gate of z; or of what has been multiplied by the gate.

    Args:
        x: ``[T, n]`` float32
        z: ``[T, n]``
        weight: ``[width]``, or ``[n]``

    Returns:
        ``[T, n]`` in z's dtype, rounded once.
    """
    if gpu.takes(z):
        return kernels.gated_norm(x, z, weight, eps, width, gate, gate_first)
    library = kernels_for(z)
    if library is not None and x.dtype == torch.float32 and weight.dtype == z.dtype:
        return native.gated_norm(library, x, z, weight, eps, width, gate, gate_first)
    return reference.gated_norm_ref(x, z, weight, eps, width, gate, gate_first=gate_first)
