"""Attention to chosen keys. Reference: ``headrace.kernels.indexer.reference``."""

from __future__ import annotations

import torch
import triton.language as tl

from headrace.kernels import support
from headrace.kernels.attention.tiling import Tiling, cut
from headrace.kernels.attention.triton_splits import merge, partials
from headrace.kernels.attention.triton_tile import load_part
from headrace.kernels.indexer.reference import ChoiceRule, TokenPlaces
from headrace.kernels.support import cdiv, power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import begin, options

_SPLIT = 256
"""Chosen keys of a split, at least."""


@launched(do_not_specialize=["top_k", "split_keys"])
def _attend_chosen(
    q, keys, values, tables, rows, positions, chosen, out, lse, scale, top_k, split_keys, q_token: tl.int64, q_head: tl.int64,
    k_block: tl.int64, k_offset: tl.int64, k_head: tl.int64, v_block: tl.int64, v_offset: tl.int64, v_head: tl.int64,
    table_row: tl.int64, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, SHARE: tl.constexpr,
    LISTS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    D: tl.constexpr, D_A: tl.constexpr, D_B: tl.constexpr, DV: tl.constexpr, DV_A: tl.constexpr, DV_B: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One token: ``SHARE`` heads of one KV head, and one split of the chosen keys."""
    begin(PDL)
    shares: tl.constexpr = (GROUP + SHARE - 1) // SHARE
    token = tl.program_id(0).to(tl.int64)
    kv_head = (tl.program_id(1) // shares).to(tl.int64)
    split = tl.program_id(2)
    row = tl.load(rows + token).to(tl.int64)
    position = tl.load(positions + token)
    m = tl.arange(0, BLOCK_M)
    in_group = tl.program_id(1) % shares * SHARE + m
    valid = (m < SHARE) & (in_group < GROUP)
    head = kv_head * GROUP + in_group
    q_base = q + token * q_token + head * q_head
    q_a = load_part(q_base, valid, 0, D, D_A, 1, True, True)
    if D_B > 0:
        q_b = load_part(q_base, valid, D_A, D, D_B, 1, True, True)
    factor = scale * 1.4426950408889634
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc_a = tl.zeros([BLOCK_M, DV_A], tl.float32)
    if DV_B > 0:
        acc_b = tl.zeros([BLOCK_M, DV_B], tl.float32)
    places = chosen + (token * LISTS + kv_head * LISTS // KV_HEADS) * top_k
    low = 0
    high = tl.minimum((position + BLOCK) // BLOCK, top_k) * BLOCK
    if SPLIT:
        low = split * split_keys
        high = tl.minimum(high, low + split_keys)
    for start in range(low, high, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        number = tl.load(places + j // BLOCK, mask=j < high, other=-1)
        key = number * BLOCK + j % BLOCK
        present = (number >= 0) & (key <= position)
        key = tl.where(present, key, 0)
        block = tl.load(tables + row * table_row + key // BLOCK_SIZE).to(tl.int64)
        offset = key % BLOCK_SIZE
        base = keys + kv_head * k_head + block * k_block + offset * k_offset
        scores = tl.dot(q_a, load_part(base, present, 0, D, D_A, 1, False, True), input_precision=PRECISION)
        if D_B > 0:
            k_b = load_part(base, present, D_A, D, D_B, 1, False, True)
            scores = tl.dot(q_b, k_b, scores, input_precision=PRECISION)
        scores = tl.where(present[None, :], scores * factor, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        pivot = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(scores - pivot[:, None])
        decay = tl.exp2(highest - pivot)
        highest = new_highest
        total = total * decay + tl.sum(weights, 1)
        weights = weights.to(q_a.dtype)
        base = values + kv_head * v_head + block * v_block + offset * v_offset
        acc_a = acc_a * decay[:, None]
        acc_a = tl.dot(weights, load_part(base, present, 0, DV, DV_A, 1, True, True), acc_a, input_precision=PRECISION)
        if DV_B > 0:
            acc_b = acc_b * decay[:, None]
            v_b = load_part(base, present, DV_A, DV, DV_B, 1, True, True)
            acc_b = tl.dot(weights, v_b, acc_b, input_precision=PRECISION)
    inverse = 1.0 / tl.where(total == 0.0, 1.0, total)
    place = token * HEADS + head
    if SPLIT:
        place = place * tl.num_programs(2) + split
        mass = tl.where(total == 0.0, float("-inf"), highest + tl.log2(tl.where(total == 0.0, 1.0, total)))
        tl.store(lse + place, mass, mask=valid)
    target = out + place * DV
    channel = tl.arange(0, DV_A)
    mask = valid[:, None] & (channel < DV)[None, :]
    tl.store(target[:, None] + channel[None, :], (acc_a * inverse[:, None]).to(out.dtype.element_ty), mask=mask)
    if DV_B > 0:
        channel = DV_A + tl.arange(0, DV_B)
        mask = valid[:, None] & (channel < DV)[None, :]
        tl.store(target[:, None] + channel[None, :], (acc_b * inverse[:, None]).to(out.dtype.element_ty), mask=mask)


def _shape(group: int, widest: int, itemsize: int) -> tuple[int, int, int]:
    """Heads of a program, keys of a tile, and warps. Keys are loaded for each program again: heads share what fits."""
    if itemsize > 2:
        return min(group, 16), 16 if widest > 256 else 32, 4
    return min(group, 64), 32 if widest > 256 else 64, 8 if widest > 256 and group > 16 else 4


def attend_chosen(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    places: TokenPlaces,
    chosen: torch.Tensor,
    rule: ChoiceRule,
    *,
    scale: float,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.indexer.attend_chosen``."""
    tokens, num_heads, width = q.shape
    block_size, kv_heads, v_width = values.shape[1:]
    out = torch.empty(tokens, num_heads, v_width, dtype=q.dtype, device=q.device)
    if not tokens:
        return out
    group = num_heads // kv_heads
    share, block_n, num_warps = _shape(group, max(width, v_width), q.itemsize)
    programs = kv_heads * cdiv(group, share)
    splits = 1
    if not batch_invariant:
        # Two programs for each multiprocessor: few tokens share their keys among several.
        wanted = 2 * support.resources(q.device).multiprocessors // (tokens * programs)
        splits = max(1, min(wanted, rule.top_k * rule.block // _SPLIT))
    split_keys = cdiv(cdiv(rule.top_k * rule.block, splits), block_n) * block_n
    tiling = Tiling(1, share, block_n, splits, 0, num_warps, 2)
    target = lse = out
    if tiling.merges:
        target, lse = partials(tiling, tokens, out, None)
    (d_a, d_b), (dv_a, dv_b) = cut(width), cut(v_width)
    _attend_chosen[(tokens, programs, splits)](
        q, keys, values, block_table, places.rows, places.positions, chosen, target, lse, scale, rule.top_k, split_keys,
        *q.stride()[:2], *keys.stride()[:3], *values.stride()[:3], block_table.stride(0),
        BLOCK_SIZE=block_size, HEADS=num_heads, GROUP=group, SHARE=share, LISTS=chosen.shape[1], KV_HEADS=kv_heads,
        BLOCK=rule.block, BLOCK_M=max(16, power_of_two(share)), BLOCK_N=block_n,
        D=width, D_A=d_a, D_B=d_b, DV=v_width, DV_A=dv_a, DV_B=dv_b,
        SPLIT=tiling.merges, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=num_warps, num_stages=2, **options(q.device),
    )  # fmt: skip
    if tiling.merges:
        merge(target, lse, out, tiling)
    return out
