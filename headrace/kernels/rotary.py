"""Rotary position embedding (Su et al., 2021), rotate-half style: channel i pairs with channel i + rotary_dim / 2."""

from __future__ import annotations

import torch


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
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    return _rotate(q, cos, sin, rotary_dim), _rotate(k, cos, sin, rotary_dim)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    first, second = x[..., :rotary_dim].float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return rotated if rotary_dim == x.shape[-1] else torch.cat((rotated, x[..., rotary_dim:]), dim=-1)
