"""QK-norm, rotary embedding and KV cache write in one, between a layer's fused projection and attention."""

from __future__ import annotations

import torch

from headrace.kernels.kv_cache import reshape_and_cache
from headrace.kernels.norm.reference import rms_norm_ref
from headrace.kernels.rotary.reference import rotate_ref


def norm_rotate_and_cache(
    qkv: torch.Tensor,
    num_heads: int,
    key_cache: torch.Tensor | None,
    value_cache: torch.Tensor | None,
    slot_mapping: torch.Tensor | None,
    *,
    cos_sin: torch.Tensor | None = None,
    rotary_dim: int = 0,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    offset: bool = False,
    v_from_k: bool = False,
    v_norm: bool = False,
    v_factor: float = 1.0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norms and rotates q and k, and writes k and v to their slots.

    Args:
        qkv: ``[T, num_heads * d + kv_heads * d + kv_heads * dv]``, last axis contiguous: q, k, v of each token. With no
            cache given (a layer that reads another's KV): ``[T, num_heads * d]``, q alone.
        key_cache, value_cache: ``[blocks, block_size, kv_heads, d]`` and ``[..., dv]`` of any strides.
        slot_mapping: ``[T]`` int64; -1 writes nothing to the cache.
        cos_sin: ``[T, rotary_dim]`` float32: a token's cosines, then its sines; for a ``rotary_dim`` above 0.
        q_weight, k_weight: ``[d]``, of qkv's dtype: weights of the RMS norm of each head; None: no norm.
        offset: those norms multiply by ``1 + weight``.
        v_from_k: the values are the keys before their norm and rotation, and ``qkv`` has no v.
        v_norm: each head of v goes through the RMS norm without weights.
        v_factor: what v is multiplied by after that.
        k_scale, v_scale: ``[blocks, block_size, kv_heads]`` float32 of the same strides, for a cache in e4m3.
        q_out: ``[T, num_heads, d]`` for the finished q; None: written in place of q in ``qkv``.

    Returns:
        ``[T, num_heads, d]``: the finished q.
    """
    kv_heads, head_dim, v_head_dim = head_sizes(qkv, num_heads, key_cache, value_cache)
    q, k = qkv[:, : num_heads * head_dim], qkv[:, num_heads * head_dim : (num_heads + kv_heads) * head_dim]
    v = k if v_from_k else qkv[:, (num_heads + kv_heads) * head_dim :]
    q_view = q.view(len(qkv), num_heads, head_dim)
    q, k = q_view, k.view(len(qkv), kv_heads, head_dim)
    if q_weight is not None:
        q = rms_norm_ref(q, q_weight, eps, offset=offset)
    if k_weight is not None and kv_heads:
        k = rms_norm_ref(k, k_weight, eps, offset=offset)
    if cos_sin is not None and rotary_dim:
        q, k = rotate_ref(q, k, cos_sin, rotary_dim)
    if key_cache is not None and value_cache is not None and slot_mapping is not None:
        v = v.view(len(qkv), kv_heads, v_head_dim)
        if v_norm:
            v = rms_norm_ref(v, v.new_ones(v_head_dim), eps)
        if v_factor != 1:
            v = v * v_factor
        reshape_and_cache(k, v, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    return (q_view if q_out is None else q_out).copy_(q)


def head_sizes(
    qkv: torch.Tensor, num_heads: int, key_cache: torch.Tensor | None, value_cache: torch.Tensor | None
) -> tuple[int, int, int]:
    """KV heads, head_dim and v_head_dim; 0, head_dim and 0 with no cache."""
    if key_cache is None or value_cache is None:
        return 0, qkv.shape[1] // num_heads, 0
    return *key_cache.shape[2:], value_cache.shape[3]
