"""Mamba-1's recurrence. Reference: ``headrace.kernels.state.reference.selective_scan_ref``.

A program absorbs one row's tokens in order, with the states of some channels in registers.
"""

from __future__ import annotations

import torch
import triton.language as tl

from headrace.kernels.state.metadata import StateMetadata, token_rows
from headrace.kernels.state.triton import outputs
from headrace.kernels.state.triton_tiles import softplus
from headrace.kernels.support import cdiv, power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import begin, options

_SCANNED = 32
"""Channels of one program."""


@launched(do_not_specialize=["channels"])
def _selective_scan(
    x, dt, b, c, rate, d, dt_bias, state, out, query_start, blocks, channels, x_row: tl.int64, dt_row: tl.int64,
    b_row: tl.int64, c_row: tl.int64, state_block: tl.int64, SIZE: tl.constexpr, SIZE_P: tl.constexpr, CHANNELS: tl.constexpr,
    PDL: tl.constexpr
):  # fmt: skip
    """``CHANNELS`` channels of a row."""
    begin(PDL)
    row = tl.program_id(1)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    number = tl.arange(0, SIZE_P)
    present, in_size = channel < channels, number < SIZE
    inside = present[:, None] & in_size[None, :]
    block = tl.load(blocks + row).to(tl.int64)
    live = block >= 0
    at = channel[:, None] * SIZE + number[None, :]
    place = state + tl.maximum(block, 0) * state_block + at
    held = tl.load(place, mask=inside & live, other=0.0).to(tl.float32)
    rates = tl.load(rate + at, mask=inside, other=0.0)
    added, factor = tl.load(dt_bias + channel, mask=present, other=0.0), tl.load(d + channel, mask=present, other=0.0)
    for token in range(tl.load(query_start + row).to(tl.int64), tl.load(query_start + row + 1).to(tl.int64)):
        value = tl.load(x + token * x_row + channel, mask=present, other=0.0).to(tl.float32)
        delta = softplus(tl.load(dt + token * dt_row + channel, mask=present, other=0.0).to(tl.float32) + added)
        write = tl.load(b + token * b_row + number, mask=in_size, other=0.0).to(tl.float32)
        read = tl.load(c + token * c_row + number, mask=in_size, other=0.0).to(tl.float32)
        held = held * tl.exp(rates * delta[:, None]) + (delta * value)[:, None] * write[None, :]
        result = tl.where(live, tl.sum(held * read[None, :], 1) + factor * value, 0.0)
        tl.store(out + token * channels + channel, result, mask=present)
        held = held.to(state.dtype.element_ty).to(tl.float32)
    tl.store(place, held.to(state.dtype.element_ty), mask=inside & live)


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    rate: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    step: StateMetadata,
) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.state.selective_scan``."""
    x, dt, b, c = token_rows(x), token_rows(dt), token_rows(b), token_rows(c)
    channels, size = rate.shape
    out = outputs(step, len(x), channels, torch.float32, x.device)
    if not len(x):
        return out
    tile = min(_SCANNED, power_of_two(channels))
    _selective_scan[(cdiv(channels, tile), step.num_rows)](
        x, dt, b, c, rate.contiguous(), d, dt_bias, state, out, step.query_start, step.blocks, channels, x.stride(0),
        dt.stride(0), b.stride(0), c.stride(0), state.stride(0), SIZE=size, SIZE_P=power_of_two(size), CHANNELS=tile,
        num_warps=1, **options(x.device),
    )  # fmt: skip
    return out
