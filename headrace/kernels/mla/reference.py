"""MLA from the projections to attention: norm, rotary embedding and the write to the cache in one."""

from __future__ import annotations

import torch

from headrace.kernels.norm.reference import rms_norm_ref
from headrace.kernels.rotary.reference import rotate_ref


def norm_rotate_and_cache_mla(
    q: torch.Tensor,
    compressed: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    rows: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_out: torch.Tensor | None = None,
) -> None:
    """Rotates q; norms and rotates the compressed KV and writes it to its slots.

    Args:
        q: ``[T, num_heads, d]`` contiguous: the leading ``rotary_dim`` channels of every head are rotated.
        compressed: ``[T, rotary_dim + rank]``, last axis contiguous: channels to rotate, then those to norm.
        weight: ``[rank]``, of q's dtype, of the RMS norm.
        cos_sin: ``[T, rotary_dim]`` float32: a token's cosines, then its sines.
        rows: ``[blocks, block_size, 1, rotary_dim + rank]`` of q's dtype, its last axis contiguous.
        slot_mapping: ``[T]`` int64: ``block * block_size + offset``; -1 writes nothing.
        q_out: ``[T, num_heads, rotary_dim or more]``, last axis contiguous: its leading channels get the rotated ones, and q
            stays as it is. None: written in place in q.
    """
    rotary_dim = cos_sin.shape[1]
    normed = torch.cat((compressed[:, :rotary_dim], rms_norm_ref(compressed[:, rotary_dim:], weight, eps)), dim=1)
    rotated, row = rotate_ref(q, normed.unsqueeze(1), cos_sin, rotary_dim)
    (q if q_out is None else q_out)[..., :rotary_dim] = rotated[..., :rotary_dim]
    kept = slot_mapping >= 0
    slots, size = slot_mapping[kept], rows.shape[1]
    rows[slots // size, slots % size] = row[kept]
