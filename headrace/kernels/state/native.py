"""State layers by the native kernels. None: the library is not there, or does not support the tensors' dtypes."""

from __future__ import annotations

import math
from ctypes import byref
from typing import Literal

import torch

from headrace.kernels.native.library import DTYPES, kernels_for
from headrace.kernels.native.structs import NativeRecurrence, NativeStateRows
from headrace.kernels.state.metadata import Pending, StateMetadata, token_rows
from headrace.kernels.state.reference import Gate


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Literal["silu"] | None,
    cache: torch.Tensor,
    step: StateMetadata,
) -> torch.Tensor | None:
    return _convolve(x, weight, bias, cache, step, gated=False, silu=activation == "silu")


def gated_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, cache: torch.Tensor, step: StateMetadata
) -> torch.Tensor | None:
    return _convolve(x, weight, bias, cache, step, gated=True, silu=False)


def _convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cache: torch.Tensor,
    step: StateMetadata,
    *,
    gated: bool,
    silu: bool,
) -> torch.Tensor | None:
    if (native := kernels_for(x, weight, cache)) is None:
        return None
    x, weight = token_rows(x), weight.contiguous()
    channels, taps = weight.shape
    out = torch.empty(len(x), channels, dtype=x.dtype)
    at = None if bias is None else bias.data_ptr()
    sizes = channels, taps, x.stride(0), cache.stride(0)
    tensors = x.data_ptr(), weight.data_ptr(), at, cache.data_ptr(), out.data_ptr()
    native.causal_conv(*tensors, byref(state_rows(step)), *sizes, gated, silu, DTYPES[x.dtype])
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
    pending: Pending | None = None,
) -> torch.Tensor | None:
    if (native := kernels_for(qkv, decay, beta)) is None or state.dtype not in DTYPES:
        return None
    heads, value_dim, key_dim = state.shape[1:]
    qkv, decay, beta = token_rows(qkv), token_rows(decay), token_rows(beta)
    shared = (qkv.shape[1] - heads * value_dim) // (2 * key_dim)
    out = torch.empty(len(qkv), heads * value_dim, dtype=torch.float32)
    strides = qkv.stride(0), decay.stride(0), beta.stride(0), state.stride(0)
    shape = NativeRecurrence(heads, shared, value_dim, key_dim, *strides)
    tensors = _addresses(qkv, decay, beta, a_log, dt_bias, state, out)
    options = decay.shape[1] // heads, beta_factor, DTYPES[qkv.dtype], DTYPES[state.dtype]
    native.delta_rule(*tensors, byref(state_rows(step)), byref(shape), *options)
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
) -> torch.Tensor | None:
    if (native := kernels_for(xbc, dt)) is None or state.dtype not in DTYPES:
        return None
    heads, width, size = state.shape[1:]
    xbc, dt = token_rows(xbc), token_rows(dt)
    shared = (xbc.shape[1] - heads * width) // (2 * size)
    out = torch.empty(len(xbc), heads * width, dtype=torch.float32)
    shape = NativeRecurrence(heads, shared, width, size, xbc.stride(0), dt.stride(0), 0, state.stride(0))
    tensors = _addresses(xbc, dt, a_log, d, dt_bias, state, out)
    native.state_space(*tensors, byref(state_rows(step)), byref(shape), *dt_limit, DTYPES[xbc.dtype], DTYPES[state.dtype])
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
) -> torch.Tensor | None:
    if (native := kernels_for(x, dt, b, c)) is None or state.dtype not in DTYPES:
        return None
    channels, size = rate.shape
    x, dt, rate = token_rows(x), token_rows(dt), rate.contiguous()
    bc = torch.cat((b, c), dim=1)
    out = torch.empty(len(x), channels, dtype=torch.float32)
    shape = NativeRecurrence(channels, 1, 1, size, x.stride(0), dt.stride(0), bc.stride(0), state.stride(0))
    tensors = _addresses(x, dt, bc, rate, d, dt_bias, state, out)
    native.selective_scan(*tensors, byref(state_rows(step)), byref(shape), DTYPES[x.dtype], DTYPES[state.dtype])
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
) -> torch.Tensor | None:
    if (native := kernels_for(z, weight)) is None or x.dtype != torch.float32:
        return None
    x, z = x.contiguous(), token_rows(z)
    out = torch.empty(z.shape, dtype=z.dtype)
    sizes = *z.shape, width, weight.numel(), z.stride(0)
    native.gated_norm(*_addresses(x, z, weight, out), *sizes, eps, gate == "sigmoid", gate_first, DTYPES[z.dtype])
    return out


def _addresses(*tensors: torch.Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def state_rows(step: StateMetadata) -> NativeStateRows:
    """The rows as the library takes them: addresses of tensors that ``step`` holds."""
    tensors = (step.query_start, step.blocks, step.starts)
    return NativeStateRows(*(tensor.data_ptr() for tensor in tensors), step.num_rows)
