"""Rotary position embedding (Su et al., 2021), rotate-half style: channel i pairs with channel i + rotary_dim / 2."""

from __future__ import annotations

import torch

from headrace.kernels.native.library import DTYPES, NativeKernels, kernels_for


def rotate(q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates the leading ``rotary_dim`` channels of every head; the others pass. Computed in float32, rounded once.

    Args:
        q: ``[T, num_heads, d]``
        k: ``[T, num_kv_heads, d]``
        cos_sin: ``[T, rotary_dim]`` float32: the cosines of the ``rotary_dim / 2`` angles of a token, then their sines.
        rotary_dim: even, at most d.

    Returns:
        Rotated q and k, new tensors in their own dtypes.
    """
    native = kernels_for(q)
    if native is None or k.dtype != q.dtype:
        return rotate_ref(q, k, cos_sin, rotary_dim)
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
) -> torch.Tensor:
    """``rotate``, with k and v going straight to the KV cache.

    Args:
        q, k, cos_sin, rotary_dim: as for ``rotate``; with a ``rotary_dim`` of 0 nothing is rotated.
        v: ``[T, num_kv_heads, dv]``
        rows: ``[num_blocks, block_size, num_kv_heads, d + dv]``, each block contiguous; changed in place.
        slots: ``[T]`` int64, ``block * block_size + offset``; a negative one writes nothing.

    Returns:
        The rotated q.
    """
    native = kernels_for(q)
    if native is None or not q.dtype == k.dtype == v.dtype == rows.dtype:
        if rotary_dim:
            q, k = rotate_ref(q, k, cos_sin, rotary_dim)
        kept = slots >= 0
        blocks, offsets = slots[kept] // rows.shape[1], slots[kept] % rows.shape[1]
        rows[blocks, offsets] = torch.cat((k, v), dim=-1)[kept]
        return q
    q, k, v, cos_sin, slots = _by_heads(q), _by_heads(k), _by_heads(v), cos_sin.contiguous(), slots.contiguous()
    tokens, heads, width = q.shape
    out = torch.empty(tokens, heads, width, dtype=q.dtype)
    native.rotate_and_write(
        q.data_ptr(),
        q.stride(0),
        k.data_ptr(),
        k.stride(0),
        v.data_ptr(),
        v.stride(0),
        cos_sin.data_ptr(),
        slots.data_ptr(),
        rows.data_ptr(),
        out.data_ptr(),
        tokens,
        heads,
        k.shape[1],
        width,
        v.shape[2],
        rotary_dim,
        rows.shape[1],
        rows.stride(0),
        DTYPES[q.dtype],
    )
    return out


def _by_heads(x: torch.Tensor) -> torch.Tensor:
    """x with its heads side by side: ``[T, heads, d]`` may be a slice of wider rows."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def _rotate(native: NativeKernels, x: torch.Tensor, cos_sin: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    x = _by_heads(x)
    tokens, heads, width = x.shape
    out = torch.empty(tokens, heads, width, dtype=x.dtype)
    native.rotate(
        x.data_ptr(),
        x.stride(0),
        cos_sin.data_ptr(),
        out.data_ptr(),
        tokens,
        heads,
        width,
        rotary_dim,
        DTYPES[x.dtype],
    )
    return out


def rotate_ref(q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    return _rotate_ref(q, cos, sin, rotary_dim), _rotate_ref(k, cos, sin, rotary_dim)


def _rotate_ref(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    first, second = x[..., :rotary_dim].float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return rotated if rotary_dim == x.shape[-1] else torch.cat((rotated, x[..., rotary_dim:]), dim=-1)
