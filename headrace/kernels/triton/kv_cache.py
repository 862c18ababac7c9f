"""Writing to a paged KV cache. Twin: ``headrace.kernels.kv_cache``."""

# A kernel's arguments have no types of Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.kv_cache import check_cache
from headrace.kernels.triton.fp8 import OFF, as_bytes, mode, quantized, scale_of


@triton.jit
def store_heads(
    new,
    cache,
    scales,
    block,
    offset,
    head,
    lane,
    mask,
    head_mask,
    cache_block,
    cache_offset,
    cache_head,
    scale_block,
    scale_offset,
    scale_head,
    CACHE_LANE: tl.constexpr,
    FP8: tl.constexpr,
):
    """Stores ``new [heads, width]``, quantised a head at a time where FP8 is not 0."""
    target = cache + block * cache_block + offset * cache_offset + head[:, None] * cache_head + lane[None, :] * CACHE_LANE
    if FP8 == 0:
        tl.store(target, new.to(cache.dtype.element_ty), mask=mask)
    else:
        wide = new.to(tl.float32)
        scale = scale_of(wide, 1)
        tl.store(scales + block * scale_block + offset * scale_offset + head * scale_head, scale, mask=head_mask)
        tl.store(target, quantized(wide, tl.broadcast_to(scale[:, None], wide.shape), FP8), mask=mask)


@triton.jit
def _reshape_and_cache(
    key,
    value,
    key_cache,
    value_cache,
    k_scale,
    v_scale,
    slot_mapping,
    key_token: tl.int64,
    key_head: tl.int64,
    value_token: tl.int64,
    value_head: tl.int64,
    kc_block: tl.int64,
    kc_offset: tl.int64,
    kc_head: tl.int64,
    vc_block: tl.int64,
    vc_offset: tl.int64,
    vc_head: tl.int64,
    ks_block: tl.int64,
    ks_offset: tl.int64,
    ks_head: tl.int64,
    vs_block: tl.int64,
    vs_offset: tl.int64,
    vs_head: tl.int64,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    HEADS_P: tl.constexpr,
    D: tl.constexpr,
    D_P: tl.constexpr,
    DV: tl.constexpr,
    DV_P: tl.constexpr,
    K_LANE: tl.constexpr,
    V_LANE: tl.constexpr,
    FP8: tl.constexpr,
):
    """All heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot >= 0:
        block = slot // BLOCK_SIZE
        offset = slot % BLOCK_SIZE
        head = tl.arange(0, HEADS_P)
        present = head < HEADS
        lane = tl.arange(0, D_P)
        mask = present[:, None] & (lane < D)[None, :]
        new = tl.load(key + token * key_token + head[:, None] * key_head + lane[None, :], mask=mask, other=0.0)
        store_heads(
            new, key_cache, k_scale, block, offset, head, lane, mask, present,
            kc_block, kc_offset, kc_head, ks_block, ks_offset, ks_head, K_LANE, FP8,
        )  # fmt: skip
        lane = tl.arange(0, DV_P)
        mask = present[:, None] & (lane < DV)[None, :]
        new = tl.load(value + token * value_token + head[:, None] * value_head + lane[None, :], mask=mask, other=0.0)
        store_heads(
            new, value_cache, v_scale, block, offset, head, lane, mask, present,
            vc_block, vc_offset, vc_head, vs_block, vs_offset, vs_head, V_LANE, FP8,
        )  # fmt: skip


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str = "auto",
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """As its twin. The last axes of keys and values must be contiguous; ``slot_mapping`` is int64 or int32."""
    check_cache(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale)
    check_last_axes(key, value, slot_mapping)
    tokens, heads, head_dim = key.shape
    if not tokens:
        return
    v_head_dim = value.shape[2]
    fp8 = OFF if k_scale is None else mode(key.device)
    heads_p, d_p, dv_p = (triton.next_power_of_2(size) for size in (heads, head_dim, v_head_dim))
    _reshape_and_cache[(tokens,)](
        key,
        value,
        as_bytes(key_cache) if fp8 else key_cache,
        as_bytes(value_cache) if fp8 else value_cache,
        key if k_scale is None else k_scale,
        key if v_scale is None else v_scale,
        slot_mapping,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *scale_strides(k_scale),
        *scale_strides(v_scale),
        BLOCK_SIZE=key_cache.shape[1],
        HEADS=heads,
        HEADS_P=heads_p,
        D=head_dim,
        D_P=d_p,
        DV=v_head_dim,
        DV_P=dv_p,
        K_LANE=key_cache.stride(3),
        V_LANE=value_cache.stride(3),
        FP8=fp8,
        num_warps=min(max(heads_p * max(d_p, dv_p) // 256, 1), 8),
    )


def scale_strides(scale: torch.Tensor | None) -> tuple[int, ...]:
    """Strides of a ``[blocks, block_size, kv_heads]`` tensor of scales."""
    return (0, 0, 0) if scale is None else scale.stride()


def check_last_axes(*tensors: torch.Tensor) -> None:
    """Raises ValueError unless every last axis is contiguous."""
    for tensor in tensors:
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"the last axis of {list(tensor.shape)} must be contiguous; its stride is {tensor.stride(-1)}")
