"""Rotary position embedding (Su et al., 2021), rotate-half style: channel i pairs with channel i + rotary_dim / 2."""

from __future__ import annotations

import torch

from headrace.kernels.native.library import kernels_for
from headrace.kernels.rotary import native
from headrace.kernels.rotary.reference import rotate_and_write_ref, rotate_ref


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
    library = kernels_for(q)
    if library is None or k.dtype != q.dtype:
        return rotate_ref(q, k, cos_sin, rotary_dim)
    return native.rotate(library, q, k, cos_sin, rotary_dim)


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
    library = kernels_for(q)
    if library is None or not q.dtype == k.dtype == v.dtype == rows.dtype:
        return rotate_and_write_ref(q, k, v, cos_sin, rotary_dim, rows, slots)
    return native.rotate_and_write(library, q, k, v, cos_sin, rotary_dim, rows, slots)
