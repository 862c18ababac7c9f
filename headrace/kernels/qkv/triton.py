"""QK-norm, rotary embedding and the write to the KV cache in one launch. Reference: ``headrace.kernels.qkv.reference``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.kv_cache.triton import scale_strides, store_heads
from headrace.kernels.kv_cache.triton_fp8 import OFF, as_bytes, mode, quantized, scale_of_peak
from headrace.kernels.norm.triton import scaled
from headrace.kernels.qkv.reference import head_sizes
from headrace.kernels.support import cdiv, power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import begin, options

_ELEMENTS = 1024
"""Elements of one program: 16 bytes for each thread of four warps."""


@triton.jit
def _load_part(base, present, FIRST: tl.constexpr, WIDTH: tl.constexpr, WIDTH_P: tl.constexpr):
    """``[heads, WIDTH_P]``: channels ``FIRST ... FIRST + WIDTH`` of each head."""
    lane = tl.arange(0, WIDTH_P)
    mask = present[:, None] & (lane < WIDTH)[None, :]
    return tl.load(base[:, None] + FIRST + lane[None, :], mask=mask, other=0.0)


@triton.jit
def _store_part(
    base, part, present, FIRST: tl.constexpr, WIDTH: tl.constexpr, WIDTH_P: tl.constexpr, LANE: tl.constexpr
):  # fmt: skip
    lane = tl.arange(0, WIDTH_P)
    mask = present[:, None] & (lane < WIDTH)[None, :]
    tl.store(base[:, None] + (FIRST + lane[None, :]) * LANE, part.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _scaled(
    part, rms, weight, FIRST: tl.constexpr, WIDTH: tl.constexpr, WIDTH_P: tl.constexpr, OFFSET: tl.constexpr
):  # fmt: skip
    lane = tl.arange(0, WIDTH_P)
    factor = tl.load(weight + FIRST + lane, mask=lane < WIDTH, other=0.0)
    return scaled(part, rms[:, None], factor[None, :], OFFSET)


@triton.jit
def _squares(part):
    wide = part.to(tl.float32)
    return tl.sum(wide * wide, 1)


@triton.jit
def _prepared(
    base, present, weight, angles, eps, D: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr, REST: tl.constexpr,
    REST_P: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr
):  # fmt: skip
    """Heads normed and rotated, in three parts: the two halves of the rotated channels, and the channels after them.

    A part of width 0 repeats another one and is not stored.
    """
    if HALF > 0:
        first = _load_part(base, present, 0, HALF, HALF_P)
        second = _load_part(base, present, HALF, HALF, HALF_P)
    if REST > 0:
        rest = _load_part(base, present, 2 * HALF, REST, REST_P)
    if HALF == 0:
        first = rest
        second = rest
    if REST == 0:
        rest = first
    if NORM:
        if HALF > 0 and REST > 0:
            total = _squares(first) + _squares(second) + _squares(rest)
        elif HALF > 0:
            total = _squares(first) + _squares(second)
        else:
            total = _squares(rest)
        rms = tl.rsqrt(total / D + eps)
        if HALF > 0:
            first = _scaled(first, rms, weight, 0, HALF, HALF_P, OFFSET)
            second = _scaled(second, rms, weight, HALF, HALF, HALF_P, OFFSET)
        if REST > 0:
            rest = _scaled(rest, rms, weight, 2 * HALF, REST, REST_P, OFFSET)
    if HALF > 0:
        lane = tl.arange(0, HALF_P)
        cos = tl.load(angles + lane, mask=lane < HALF, other=0.0)[None, :]
        sin = tl.load(angles + HALF + lane, mask=lane < HALF, other=0.0)[None, :]
        x = first.to(tl.float32)
        y = second.to(tl.float32)
        first = (x * cos - y * sin).to(first.dtype)
        second = (y * cos + x * sin).to(second.dtype)
    return first, second, rest


@triton.jit
def _peak(part):
    """The largest absolute value of each head's part, as float32's bits: NaN is above infinity."""
    return tl.max(part.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def _quantized_part(part, scale, FP8: tl.constexpr):
    wide = part.to(tl.float32)
    return quantized(wide, scale[:, None], FP8)


@launched
def _norm_rotate_and_cache(
    qkv, cos_sin, q_weight, k_weight, q_out, key_cache, value_cache, k_scale, v_scale, slot_mapping, eps, v_factor,
    qkv_token: tl.int64, angle_token: tl.int64, q_token: tl.int64, q_head: tl.int64, kc_block: tl.int64, kc_offset: tl.int64,
    kc_head: tl.int64, vc_block: tl.int64, vc_offset: tl.int64, vc_head: tl.int64, scale_block: tl.int64,
    scale_offset: tl.int64, scale_head: tl.int64, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    TILE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DV_P: tl.constexpr, HALF: tl.constexpr, HALF_P: tl.constexpr,
    REST: tl.constexpr, REST_P: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, OFFSET: tl.constexpr,
    V_FROM_K: tl.constexpr, V_NORM: tl.constexpr, V_SCALED: tl.constexpr, K_LANE: tl.constexpr, V_LANE: tl.constexpr,
    FP8: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """``TILE`` heads of one token: first the query heads, tile after tile, then the KV heads."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    q_tiles: tl.constexpr = (HEADS + TILE - 1) // TILE
    inside = tl.arange(0, TILE)
    angles = cos_sin + token * angle_token
    if tile < q_tiles:
        head = tile * TILE + inside
        present = head < HEADS
        base = qkv + token * qkv_token + head * D
        first, second, rest = _prepared(base, present, q_weight, angles, eps, D, HALF, HALF_P, REST, REST_P, Q_NORM, OFFSET)
        target = q_out + token * q_token + head * q_head
        if HALF > 0:
            _store_part(target, first, present, 0, HALF, HALF_P, 1)
            _store_part(target, second, present, HALF, HALF, HALF_P, 1)
        if REST > 0:
            _store_part(target, rest, present, 2 * HALF, REST, REST_P, 1)
    else:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        if slot >= 0:
            block = slot // BLOCK_SIZE
            offset = slot % BLOCK_SIZE
            head = (tile - q_tiles) * TILE + inside
            present = head < KV_HEADS
            base = qkv + token * qkv_token + (HEADS + head) * D
            first, second, rest = _prepared(base, present, k_weight, angles, eps, D, HALF, HALF_P, REST, REST_P, K_NORM, OFFSET)
            if FP8 > 0:
                peak = tl.maximum(tl.maximum(_peak(first), _peak(second)), _peak(rest))
                scale = scale_of_peak(peak.to(tl.float32, bitcast=True))
                tl.store(k_scale + block * scale_block + offset * scale_offset + head * scale_head, scale, mask=present)
                first = _quantized_part(first, scale, FP8)
                second = _quantized_part(second, scale, FP8)
                rest = _quantized_part(rest, scale, FP8)
            target = key_cache + block * kc_block + offset * kc_offset + head * kc_head
            if HALF > 0:
                _store_part(target, first, present, 0, HALF, HALF_P, K_LANE)
                _store_part(target, second, present, HALF, HALF, HALF_P, K_LANE)
            if REST > 0:
                _store_part(target, rest, present, 2 * HALF, REST, REST_P, K_LANE)
            v_first: tl.constexpr = HEADS * D if V_FROM_K else (HEADS + KV_HEADS) * D
            value = _load_part(qkv + token * qkv_token + v_first + head * DV, present, 0, DV, DV_P)
            if V_NORM:
                v_rms = tl.rsqrt(_squares(value) / DV + eps)
                value = (value.to(tl.float32) * v_rms[:, None]).to(value.dtype)
            if V_SCALED:
                value = (value.to(tl.float32) * v_factor).to(value.dtype)
            lane = tl.arange(0, DV_P)
            mask = present[:, None] & (lane < DV)[None, :]
            store_heads(
                value, value_cache, v_scale, block, offset, head, lane, mask, present,
                vc_block, vc_offset, vc_head, scale_block, scale_offset, scale_head, V_LANE, FP8,
            )  # fmt: skip


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
    """Kernel version of ``headrace.kernels.qkv.norm_rotate_and_cache``.

    Last axes must be contiguous, but for the caches'; ``slot_mapping`` is int64 or int32.
    """
    kv_heads, head_dim, v_head_dim = head_sizes(qkv, num_heads, key_cache, value_cache)
    q = qkv[:, : num_heads * head_dim].unflatten(-1, (num_heads, head_dim)) if q_out is None else q_out
    tokens = qkv.shape[0]
    if not tokens:
        return q
    caching = key_cache is not None and value_cache is not None and slot_mapping is not None
    # Where there is nothing to point at, any tensor stands in: the kernel does not touch it.
    keys = qkv[None, None] if key_cache is None else key_cache
    values = qkv[None, None] if value_cache is None else value_cache
    slots = qkv if slot_mapping is None else slot_mapping
    fp8 = OFF
    if k_scale is not None:
        fp8, keys, values = mode(qkv.device), as_bytes(keys), as_bytes(values)
    half, rest = rotary_dim // 2, head_dim - rotary_dim
    half_p, rest_p, d_p, dv_p = (power_of_two(max(width, 1)) for width in (half, rest, head_dim, v_head_dim))
    tile = min(max(_ELEMENTS // max(d_p, dv_p), 1), power_of_two(max(num_heads, kv_heads)))
    tiles = cdiv(num_heads, tile) + (cdiv(kv_heads, tile) if caching else 0)
    _norm_rotate_and_cache[(tokens, tiles)](
        qkv, qkv if cos_sin is None else cos_sin, qkv if q_weight is None else q_weight, qkv if k_weight is None else k_weight,
        q, keys, values, qkv if k_scale is None else k_scale, qkv if v_scale is None else v_scale, slots, eps, v_factor,
        qkv.stride(0), 0 if cos_sin is None else cos_sin.stride(0), *q.stride()[:2], *keys.stride()[:3], *values.stride()[:3],
        *scale_strides(k_scale), BLOCK_SIZE=keys.shape[1], HEADS=num_heads, KV_HEADS=kv_heads, TILE=tile, D=head_dim,
        DV=v_head_dim, DV_P=dv_p, HALF=half, HALF_P=half_p, REST=rest, REST_P=rest_p, Q_NORM=q_weight is not None,
        K_NORM=k_weight is not None, OFFSET=offset, V_FROM_K=v_from_k, V_NORM=v_norm, V_SCALED=v_factor != 1,
        K_LANE=keys.stride(3), V_LANE=values.stride(3), FP8=fp8, num_warps=min(max(tile * max(d_p, dv_p) // 256, 1), 4),
        **options(qkv.device),
    )  # fmt: skip
    return q
