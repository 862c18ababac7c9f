"""Norms and rotation of q and k, and the write of k and v to the cache, for a program of attention's that needs them.

Everything is loaded before anything is computed: a program waits for the memory once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.kernels.attention.triton_tile import per_key, per_query
from headrace.kernels.norm.triton import scaled


@triton.jit
def _tile(base, place, mask, HEADS: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Numbers of each channel, the same for all heads, in the tile that the heads are in."""
    places = per_key(base + place, KEYS_FIRST) + per_query(tl.zeros([HEADS], tl.int32), KEYS_FIRST)
    return tl.load(places, mask=per_key(mask, KEYS_FIRST), other=0.0).to(tl.float32)


@triton.jit
def _partner(channel, HALF: tl.constexpr):
    """The channel that one is rotated with. Those behind the rotated ones take themselves, by a sine of 0."""
    RUN: tl.constexpr = 8 if HALF % 8 == 0 else 1
    partner = tl.where(channel < 2 * HALF, (channel + HALF) % (2 * HALF), channel)
    return tl.max_contiguous(tl.multiple_of(partner, RUN), RUN)


@triton.jit
def load_weights(
    weight, WIDTH: tl.constexpr, WIDTH_P: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr,
    KEYS_FIRST: tl.constexpr
):  # fmt: skip
    """Weights of a norm, for ``HEADS`` heads and for the channels that they are rotated with. Without NORM, there are none."""
    channel = tl.arange(0, WIDTH_P)
    factor = tl.zeros([1], tl.float32)
    if NORM:
        factor = _tile(weight, channel, channel < WIDTH, HEADS, KEYS_FIRST)
    other = factor
    if NORM and HALF > 0:
        other = _tile(weight, _partner(channel, HALF), channel < WIDTH, HEADS, KEYS_FIRST)
    return factor, other


@triton.jit
def load_heads(
    base, valid, angles, WIDTH: tl.constexpr, WIDTH_P: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr,
    KEYS_FIRST: tl.constexpr
):  # fmt: skip
    """Heads that begin at ``base``, a tile with channels where keys would be; the channels that these are rotated with;
    cosines and sines."""
    RUN: tl.constexpr = 8 if HALF % 8 == 0 else 1
    channel = tl.arange(0, WIDTH_P)
    mask = per_query(valid, KEYS_FIRST) & per_key(channel < WIDTH, KEYS_FIRST)
    part = tl.load(per_query(base, KEYS_FIRST) + per_key(channel, KEYS_FIRST), mask=mask, other=0.0)
    other, cos, sin = part, part, part
    if HALF > 0:
        other = tl.load(per_query(base, KEYS_FIRST) + per_key(_partner(channel, HALF), KEYS_FIRST), mask=mask, other=0.0)
        angle = tl.max_contiguous(tl.multiple_of(channel % HALF, RUN), RUN)
        cos = _tile(angles, angle, channel < 2 * HALF, HEADS, KEYS_FIRST)
        sin = _tile(angles + HALF, angle, channel < 2 * HALF, HEADS, KEYS_FIRST)
    return part, other, cos, sin


@triton.jit
def finished(
    heads, weights, eps, WIDTH: tl.constexpr, WIDTH_P: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr,
    OFFSET: tl.constexpr, KEYS_FIRST: tl.constexpr
):  # fmt: skip
    """Norms and rotates heads."""
    part, other, cos, sin = heads
    if NORM:
        wide = part.to(tl.float32)
        rms = per_query(tl.rsqrt(tl.sum(wide * wide, 0 if KEYS_FIRST else 1) / WIDTH + eps), KEYS_FIRST)
        part = scaled(part, rms, weights[0], OFFSET)
        if HALF > 0:
            other = scaled(other, rms, weights[1], OFFSET)
    if HALF > 0:
        channel = per_key(tl.arange(0, WIDTH_P), KEYS_FIRST)
        turned = other.to(tl.float32) * sin
        turned = part.to(tl.float32) * cos + tl.where(channel < HALF, -turned, turned)
        part = tl.where(channel < 2 * HALF, turned.to(part.dtype), part)
    return part


@triton.jit
def load_new(
    slot, behind, kv_head, angles, KV_HEADS: tl.constexpr, D: tl.constexpr, D_P: tl.constexpr, DV: tl.constexpr,
    DV_P: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """A token's slot, v of one head, and k of it as ``load_heads`` loads it; ``behind``: where its k and v of all heads are."""
    one, channel = tl.arange(0, 1), tl.arange(0, DV_P)
    part, other, cos, sin = load_heads(behind + kv_head * D + one, one == 0, angles, D, D_P, HALF, 1, True)
    v = tl.load(behind + KV_HEADS * D + kv_head * DV + channel, mask=channel < DV, other=0.0)
    return tl.load(slot).to(tl.int64), v, part, other, cos, sin


@triton.jit
def write_new(
    new, weights, eps, mine, keys, values, k_block, k_offset, v_block, v_offset, BLOCK_SIZE: tl.constexpr, D: tl.constexpr,
    D_P: tl.constexpr, DV: tl.constexpr, DV_P: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr
):  # fmt: skip
    """Writes what ``load_new`` loaded to its slot, where it is ``mine``. All of the program's threads may read it then."""
    slot, v, part, other, cos, sin = new
    if mine & (slot >= 0):
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        channel = tl.arange(0, D_P)[:, None]
        place = keys + block * k_block + offset * k_offset + channel + tl.arange(0, 1)[None, :]
        k = finished((part, other, cos, sin), weights, eps, D, D_P, HALF, NORM, OFFSET, True)
        tl.store(place, k, mask=channel < D)
        channel = tl.arange(0, DV_P)
        tl.store(values + block * v_block + offset * v_offset + channel, v, mask=channel < DV)
        tl.debug_barrier()
