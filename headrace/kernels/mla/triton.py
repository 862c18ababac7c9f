"""Norm, rotation and cache write of MLA. Reference: ``headrace.kernels.mla.reference``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.norm.triton import normed
from headrace.kernels.support import power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import begin, options


@triton.jit
def _rotate_halves(source, target, cos_sin, HALF: tl.constexpr, HALF_P: tl.constexpr):
    """``source [2 * HALF]`` rotated to ``target``, which may be the same."""
    channel = tl.arange(0, HALF_P)
    mask = channel < HALF
    cos = tl.load(cos_sin + channel, mask=mask, other=0.0)
    sin = tl.load(cos_sin + HALF + channel, mask=mask, other=0.0)
    stored = tl.load(source + channel, mask=mask, other=0.0)
    first = stored.to(tl.float32)
    second = tl.load(source + HALF + channel, mask=mask, other=0.0).to(tl.float32)
    tl.store(target + channel, (first * cos - second * sin).to(stored.dtype), mask=mask)
    tl.store(target + HALF + channel, (second * cos + first * sin).to(stored.dtype), mask=mask)


@launched(do_not_specialize=["block_size"])
def _mla(
    q, q_out, compressed, weight, cos_sin, rows, slots, eps, block_size, out_token: tl.int64, out_head: tl.int64,
    compressed_row: tl.int64, block_stride: tl.int64, place_stride: tl.int64, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    HALF: tl.constexpr, HALF_P: tl.constexpr, RANK: tl.constexpr, RANK_P: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One token: a head of q, or behind them its row of the cache."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    angles = cos_sin + token * 2 * HALF
    if head < HEADS:
        target = q_out + token * out_token + head * out_head
        _rotate_halves(q + (token * HEADS + head) * WIDTH, target, angles, HALF, HALF_P)
        return
    slot = tl.load(slots + token)
    if slot < 0:
        return
    source = compressed + token * compressed_row
    target = rows + (slot // block_size) * block_stride + (slot % block_size) * place_stride
    _rotate_halves(source, target, angles, HALF, HALF_P)
    channel = tl.arange(0, RANK_P)
    mask = channel < RANK
    value = tl.load(source + 2 * HALF + channel, mask=mask, other=0.0)
    factor = tl.load(weight + channel, mask=mask, other=0.0)
    tl.store(target + 2 * HALF + channel, normed(value, factor, eps, RANK, False), mask=mask)


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
    """Kernel version of ``headrace.kernels.mla.norm_rotate_and_cache_mla``."""
    tokens, heads, width = q.shape
    if not tokens:
        return
    target = q if q_out is None else q_out
    half, rank = cos_sin.shape[1] // 2, len(weight)
    _mla[(tokens, heads + 1)](
        q, target, compressed, weight, cos_sin.contiguous(), rows, slot_mapping, eps, rows.shape[1], target.stride(0),
        target.stride(1), compressed.stride(0), rows.stride(0), rows.stride(1), HEADS=heads, WIDTH=width, HALF=half,
        HALF_P=power_of_two(max(half, 1)), RANK=rank, RANK_P=power_of_two(rank), num_warps=2, **options(q.device),
    )  # fmt: skip
