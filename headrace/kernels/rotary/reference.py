"""Rotary position embedding in plain PyTorch."""

from __future__ import annotations

import torch


def rotate_ref(q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates the leading ``rotary_dim`` channels of every head; the others pass. Computed in float32, rounded once.

    Args:
        q: ``[T, num_heads, d]``
        k: ``[T, num_kv_heads, d]``
        cos_sin: ``[T, rotary_dim]`` float32: the cosines of the ``rotary_dim / 2`` angles of a token, then their sines.
        rotary_dim: even, at most d.

    Returns:
        Rotated q and k, new tensors in their own dtypes.
    """
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    return _rotate_ref(q, cos, sin, rotary_dim), _rotate_ref(k, cos, sin, rotary_dim)


def rotate_and_write_ref(
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
    if rotary_dim:
        q, k = rotate_ref(q, k, cos_sin, rotary_dim)
    kept = slots >= 0
    blocks, offsets = slots[kept] // rows.shape[1], slots[kept] % rows.shape[1]
    rows[blocks, offsets] = torch.cat((k, v), dim=-1)[kept]
    return q


def _rotate_ref(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    first, second = x[..., :rotary_dim].float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return rotated if rotary_dim == x.shape[-1] else torch.cat((rotated, x[..., rotary_dim:]), dim=-1)
