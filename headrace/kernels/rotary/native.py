"""Rotary position embedding by the native kernels. None: the library is not there, or does not support the tensors' dtypes."""

from __future__ import annotations

import torch

from headrace.kernels.native.library import DTYPES, NativeKernels, kernels_for


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, rotary_dim: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    if (native := kernels_for(q, k)) is None:
        return None
    cos_sin = cos_sin.contiguous()
    return _rotate(native, q, cos_sin, rotary_dim), _rotate(native, k, cos_sin, rotary_dim)


def rotate_and_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos_sin: torch.Tensor,
    rotary_dim: int,
    rows: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor | None:
    if (native := kernels_for(q, k, v, rows)) is None:
        return None
    q, k, v, cos_sin, slots = _by_heads(q), _by_heads(k), _by_heads(v), cos_sin.contiguous(), slots.contiguous()
    tokens, heads, width = q.shape
    out = torch.empty(tokens, heads, width, dtype=q.dtype)
    inputs = (q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0))
    tables = cos_sin.data_ptr(), slots.data_ptr(), rows.data_ptr(), out.data_ptr()
    sizes = tokens, heads, k.shape[1], width, v.shape[2], rotary_dim, rows.shape[1], rows.stride(0)
    native.rotate_and_write(*inputs, *tables, *sizes, DTYPES[q.dtype])
    return out


def _by_heads(x: torch.Tensor) -> torch.Tensor:
    """x with its heads side by side: ``[T, heads, d]`` may be a slice of wider rows."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _rotate(native: NativeKernels, x: torch.Tensor, cos_sin: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    x = _by_heads(x)
    tokens, heads, width = x.shape
    out = torch.empty(tokens, heads, width, dtype=x.dtype)
    tensors = x.data_ptr(), x.stride(0), cos_sin.data_ptr(), out.data_ptr()
    native.rotate(*tensors, tokens, heads, width, rotary_dim, DTYPES[x.dtype])
    return out
