"""State layers by the native kernels. None: the library is not there, or does not support the tensors' dtypes."""

from __future__ import annotations

import math
from collections.abc import Callable
from ctypes import byref
from typing import Literal

import torch

from headrace.kernels.native.library import DTYPES, kernels_for
from headrace.kernels.native.structs import NativeRecurrence, NativeStateRows
from headrace.kernels.state.metadata import Pending, StateMetadata
from headrace.kernels.state.reference import Gate


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Literal["silu"] | None,
    cache: torch.Tensor,
    step: StateMetadata,
) -> torch.Tensor | None:
    native = kernels_for(x)
    if native is None or not x.dtype == weight.dtype == cache.dtype:
        return None
    return _convolve(native.causal_conv, x, weight, bias, cache, step, activation == "silu")


def gated_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cache: torch.Tensor,
    step: StateMetadata,
) -> torch.Tensor | None:
    native = kernels_for(x)
    if native is None or not x.dtype == weight.dtype == cache.dtype:
        return None
    return _convolve(native.gated_conv, x, weight, bias, cache, step)


def _convolve(
    call: Callable[..., object],
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cache: torch.Tensor,
    step: StateMetadata,
    *options: bool,
) -> torch.Tensor:
    x, weight = _rows(x), weight.contiguous()
    channels, taps = weight.shape
    out = torch.empty(len(x), channels, dtype=x.dtype)
    call(
        x.data_ptr(),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        cache.data_ptr(),
        out.data_ptr(),
        byref(state_rows(step)),
        channels,
        taps,
        x.stride(0),
        cache.stride(0),
        *options,
        DTYPES[x.dtype],
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
    pending: Pending | None = None,
) -> torch.Tensor | None:
    native = kernels_for(qkv)
    if native is None or state.dtype not in DTYPES or not qkv.dtype == decay.dtype == beta.dtype:
        return None
    heads, value_dim, key_dim = state.shape[1:]
    qkv, decay, beta = _rows(qkv), _rows(decay), _rows(beta)
    shared = (qkv.shape[1] - heads * value_dim) // (2 * key_dim)
    out = torch.empty(len(qkv), heads * value_dim, dtype=torch.float32)
    strides = qkv.stride(0), decay.stride(0), beta.stride(0), state.stride(0)
    native.delta_rule(
        qkv.data_ptr(),
        decay.data_ptr(),
        beta.data_ptr(),
        a_log.data_ptr(),
        dt_bias.data_ptr(),
        state.data_ptr(),
        out.data_ptr(),
        byref(state_rows(step)),
        byref(NativeRecurrence(heads, shared, value_dim, key_dim, *strides)),
        decay.shape[1] // heads,
        beta_factor,
        DTYPES[qkv.dtype],
        DTYPES[state.dtype],
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
    dt_limit: tuple[float, float] = (0.0, math.inf),
) -> torch.Tensor | None:
    native = kernels_for(xbc)
    if native is None or state.dtype not in DTYPES or xbc.dtype != dt.dtype:
        return None
    heads, width, size = state.shape[1:]
    xbc, dt = _rows(xbc), _rows(dt)
    shared = (xbc.shape[1] - heads * width) // (2 * size)
    out = torch.empty(len(xbc), heads * width, dtype=torch.float32)
    native.state_space(
        xbc.data_ptr(),
        dt.data_ptr(),
        a_log.data_ptr(),
        d.data_ptr(),
        dt_bias.data_ptr(),
        state.data_ptr(),
        out.data_ptr(),
        byref(state_rows(step)),
        byref(NativeRecurrence(heads, shared, width, size, xbc.stride(0), dt.stride(0), 0, state.stride(0))),
        *dt_limit,
        DTYPES[xbc.dtype],
        DTYPES[state.dtype],
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
) -> torch.Tensor | None:
    native = kernels_for(x)
    if native is None or state.dtype not in DTYPES or not x.dtype == dt.dtype == b.dtype == c.dtype:
        return None
    channels, size = rate.shape
    x, dt, rate = _rows(x), _rows(dt), rate.contiguous()
    bc = torch.cat((b, c), dim=1)
    out = torch.empty(len(x), channels, dtype=torch.float32)
    native.selective_scan(
        x.data_ptr(),
        dt.data_ptr(),
        bc.data_ptr(),
        rate.data_ptr(),
        d.data_ptr(),
        dt_bias.data_ptr(),
        state.data_ptr(),
        out.data_ptr(),
        byref(state_rows(step)),
        byref(NativeRecurrence(channels, 1, 1, size, x.stride(0), dt.stride(0), bc.stride(0), state.stride(0))),
        DTYPES[x.dtype],
        DTYPES[state.dtype],
    )
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
    native = kernels_for(z)
    if native is None or x.dtype != torch.float32 or weight.dtype != z.dtype:
        return None
    x, z = x.contiguous(), _rows(z)
    out = torch.empty(z.shape, dtype=z.dtype)
    native.gated_norm(
        x.data_ptr(),
        z.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        *z.shape,
        width,
        weight.numel(),
        z.stride(0),
        eps,
        gate == "sigmoid",
        gate_first,
        DTYPES[z.dtype],
    )
    return out


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x with the channels of a token side by side: it may be a slice of wider rows."""
    return x if x.stride(1) == 1 else x.contiguous()


def state_rows(step: StateMetadata) -> NativeStateRows:
    """The rows as the library takes them: addresses of tensors that ``step`` holds."""
    tensors = (step.query_start, step.blocks, step.starts)
    return NativeStateRows(*(tensor.data_ptr() for tensor in tensors), step.num_rows)
