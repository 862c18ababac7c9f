"""Writing to a paged KV cache, and copying pages out of it. Reference: ``headrace.kernels.kv_cache.reference``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.kv_cache.triton_fp8 import OFF, as_bytes, gain, mode, quantized, scale_of, to_half
from headrace.kernels.support import power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import begin, options


@triton.jit
def store_heads(
    new, cache, scales, block, offset, head, lane, mask, head_mask, cache_block, cache_offset, cache_head, scale_block,
    scale_offset, scale_head, CACHE_LANE: tl.constexpr, FP8: tl.constexpr
):  # fmt: skip
    """Stores ``new [heads, width]``, quantised a head at a time where FP8 is not 0."""
    target = cache + block * cache_block + offset * cache_offset + head[:, None] * cache_head + lane[None, :] * CACHE_LANE
    if FP8 == 0:
        tl.store(target, new.to(cache.dtype.element_ty), mask=mask)
    else:
        wide = new.to(tl.float32)
        scale = scale_of(wide, 1)
        tl.store(scales + block * scale_block + offset * scale_offset + head * scale_head, scale, mask=head_mask)
        tl.store(target, quantized(wide, scale[:, None], FP8), mask=mask)


@launched
def _reshape_and_cache(
    key, value, key_cache, value_cache, k_scale, v_scale, slot_mapping, key_token: tl.int64, key_head: tl.int64,
    value_token: tl.int64, value_head: tl.int64, kc_block: tl.int64, kc_offset: tl.int64, kc_head: tl.int64, vc_block: tl.int64,
    vc_offset: tl.int64, vc_head: tl.int64, scale_block: tl.int64, scale_offset: tl.int64, scale_head: tl.int64,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, HEADS_P: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr, DV: tl.constexpr,
    DV_P: tl.constexpr, K_LANE: tl.constexpr, V_LANE: tl.constexpr, FP8: tl.constexpr
):  # fmt: skip
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
            kc_block, kc_offset, kc_head, scale_block, scale_offset, scale_head, K_LANE, FP8,
        )  # fmt: skip
        lane = tl.arange(0, DV_P)
        mask = present[:, None] & (lane < DV)[None, :]
        new = tl.load(value + token * value_token + head[:, None] * value_head + lane[None, :], mask=mask, other=0.0)
        store_heads(
            new, value_cache, v_scale, block, offset, head, lane, mask, present,
            vc_block, vc_offset, vc_head, scale_block, scale_offset, scale_head, V_LANE, FP8,
        )  # fmt: skip


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Kernel version of ``headrace.kernels.kv_cache.reshape_and_cache``.

    The last axes of keys and values must be contiguous; ``slot_mapping`` is int64 or int32.
    """
    check_last_axes(key, value, slot_mapping)
    tokens, heads, head_dim = key.shape
    if not tokens:
        return
    v_head_dim = value.shape[2]
    fp8 = OFF if k_scale is None else mode(key.device)
    heads_p, d_p, dv_p = (power_of_two(size) for size in (heads, head_dim, v_head_dim))
    _reshape_and_cache[(tokens,)](
        key, value, as_bytes(key_cache) if fp8 else key_cache, as_bytes(value_cache) if fp8 else value_cache,
        key if k_scale is None else k_scale, key if v_scale is None else v_scale, slot_mapping, *key.stride()[:2],
        *value.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3], *scale_strides(k_scale),
        BLOCK_SIZE=key_cache.shape[1], HEADS=heads, HEADS_P=heads_p, D=head_dim, D_P=d_p, DV=v_head_dim, DV_P=dv_p,
        K_LANE=key_cache.stride(3), V_LANE=value_cache.stride(3), FP8=fp8,
        num_warps=min(max(heads_p * max(d_p, dv_p) // 256, 1), 8),
    )  # fmt: skip


def scale_strides(scale: torch.Tensor | None) -> tuple[int, ...]:
    """Strides of a ``[blocks, block_size, kv_heads]`` tensor of scales."""
    return (0, 0, 0) if scale is None else scale.stride()


def check_last_axes(*tensors: torch.Tensor) -> None:
    """Raises ValueError unless every last axis is contiguous."""
    for tensor in tensors:
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"the last axis of {list(tensor.shape)} must be contiguous; its stride is {tensor.stride(-1)}")


@triton.jit
def _copy_side(
    cache, scale, out, present, token_step, lane, token, WIDTH: tl.constexpr, WIDTH_P: tl.constexpr, ROW: tl.constexpr,
    FP8: tl.constexpr
):  # fmt: skip
    """Keys or values of one head of a page: ``[token, channel]`` from ``cache``, as numbers to ``out``."""
    channel = tl.arange(0, WIDTH_P)
    mask = present[:, None] & (channel < WIDTH)[None, :]
    stored = tl.load(cache + (token * token_step)[:, None] + (channel * lane)[None, :], mask=mask, other=0)
    number = to_half(stored, FP8).to(tl.float32) * (scale * gain(FP8))[:, None]
    tl.store(out + token[:, None] * ROW + channel[None, :], number.to(out.dtype.element_ty), mask=mask)


@launched(do_not_specialize_on_alignment=["pages", "first", "count"])
def _gather_numbers(
    keys, values,  # uint8
    k_scale, v_scale, pages, first, count, out,
    k_block: tl.int64, k_token, k_head, k_lane, v_block: tl.int64, v_token, v_head, v_lane,
    scale_block: tl.int64, scale_token, scale_head,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr, DV: tl.constexpr, DV_P: tl.constexpr,
    FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of a page."""
    begin(PDL)
    page, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = tl.arange(0, TOKENS)
    present = token < tl.load(count + page)
    block = tl.load(pages + page).to(tl.int64)
    row: tl.constexpr = HEADS * (D + DV)
    target = out + tl.load(first + page) * row + head * (D + DV)
    place = block * scale_block + head * scale_head + token * scale_token
    k_size = tl.load(k_scale + place, mask=present, other=0.0)
    v_size = tl.load(v_scale + place, mask=present, other=0.0)
    _copy_side(keys + block * k_block + head * k_head, k_size, target, present, k_token, k_lane, token, D, D_P, row, FP8)
    _copy_side(
        values + block * v_block + head * v_head, v_size, target + D, present, v_token, v_lane, token, DV, DV_P, row, FP8
    )  # fmt: skip


def gather_numbers(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    pages: torch.Tensor,
    first: torch.Tensor,
    count: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Kernel version of ``headrace.kernels.kv_cache.gather_numbers``."""
    if not len(pages):
        return
    heads, width, v_width = *key_cache.shape[2:], value_cache.shape[3]
    _gather_numbers[(len(pages), heads)](
        as_bytes(key_cache), as_bytes(value_cache), k_scale, v_scale, pages, first, count, out,
        *key_cache.stride(), *value_cache.stride(), *k_scale.stride(),
        TOKENS=power_of_two(key_cache.shape[1]), HEADS=heads, D=width, D_P=power_of_two(width),
        DV=v_width, DV_P=power_of_two(v_width), FP8=mode(out.device), num_warps=4, **options(out.device),
    )  # fmt: skip
