"""Causal convolutions of prompts, in tiles of 64 tokens. Reference: ``headrace.kernels.state.reference``."""

# A kernel's tuples grow.
# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

from typing import Literal

import torch
import triton.language as tl

from headrace.kernels.activation.triton import sigmoid
from headrace.kernels.kv_cache.triton_fp8 import mode
from headrace.kernels.state.metadata import TILE, StateMetadata
from headrace.kernels.support import cdiv
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import begin, options

_CHANNELS, _WARPS = 128, 1
"""Channels of a program, and its warps."""
_AT_ONCE = 8
"""Tokens that it loads at once."""
_KEPT = 128
"""Channels of a program that keeps inputs."""


@launched(do_not_specialize=["decode_rows"])
def _conv_tiles(
    x, weight, bias, cache, out, query_start, blocks, starts, tile_rows, tile_starts, decode_rows, channels, x_row: tl.int64,
    cache_block: tl.int64, TAPS: tl.constexpr, TOKENS: tl.constexpr, AT_ONCE: tl.constexpr, CHANNELS: tl.constexpr,
    BIAS: tl.constexpr, SILU: tl.constexpr, MODE: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """A tile of a prompt, whose last inputs ``_keep_inputs`` keeps, ``AT_ONCE`` tokens at a time. Inputs before the row's first
    token are those that were kept."""
    begin(PDL)
    tile = tl.program_id(1)
    row = tl.load(tile_rows + tile)
    if row >= 0:
        channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
        begins = (tile - tl.load(tile_starts + row - decode_rows)) * TOKENS
        first = tl.load(query_start + row)
        count = tl.load(query_start + row + 1) - first
        block = tl.load(blocks + row).to(tl.int64)
        start = tl.load(starts + row)
        present = channel < channels
        inside = present & (block >= 0)
        factors, before = (), ()
        for tap in tl.static_range(TAPS):
            factors += (tl.load(weight + channel * TAPS + tap, mask=present, other=0.0).to(tl.float32),)
        for tap in tl.static_range(TAPS - 1):
            offset = begins + tap - (TAPS - 1)
            place = x + (first + offset).to(tl.int64) * x_row
            if offset < 0:
                place = cache + tl.maximum(block, 0) * cache_block + (start + offset + TAPS - 1) % (TAPS - 1) * channels
            before += (tl.load(place + channel, mask=inside & (offset < count), other=0.0).to(tl.float32),)
        places = x + (first + begins).to(tl.int64) * x_row + channel
        written = out + (first + begins).to(tl.int64) * channels + channel
        for begun in range(begins, tl.minimum(begins + TOKENS, count), AT_ONCE):
            # All loads come first, so that they are under way together.
            inputs = before
            for ahead in tl.static_range(AT_ONCE):
                inputs += (tl.load(places + ahead * x_row, mask=inside & (begun + ahead < count), other=0.0).to(tl.float32),)
            for ahead in tl.static_range(AT_ONCE):
                # From 0 on, as in decode rows: of two products the compiler would round either.
                total = tl.zeros([CHANNELS], tl.float32)
                for tap in tl.static_range(TAPS):
                    total += inputs[ahead + tap] * factors[tap]
                if BIAS:
                    total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
                if SILU:
                    total = total * sigmoid(total, MODE)
                tl.store(written + ahead * channels, total.to(out.dtype.element_ty), mask=present & (begun + ahead < count))
            before = inputs[AT_ONCE:]
            places += AT_ONCE * x_row
            written += AT_ONCE * channels


@launched(do_not_specialize=["first_row"])
def _keep_inputs(
    x, cache, query_start, blocks, starts, first_row, channels, x_row: tl.int64, cache_block: tl.int64, TAPS: tl.constexpr,
    CHANNELS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Keeps the last ``TAPS - 1`` inputs of each row from ``first_row`` on."""
    begin(PDL)
    row = first_row + tl.program_id(1)
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    block = tl.load(blocks + row).to(tl.int64)
    ring = cache + tl.maximum(block, 0) * cache_block + channel
    start = tl.load(starts + row)
    first = tl.load(query_start + row).to(tl.int64)
    count = (tl.load(query_start + row + 1) - first).to(tl.int32)
    mask = (channel < channels) & (block >= 0)
    for offset in range(tl.maximum(count - TAPS + 1, 0), count):
        value = tl.load(x + (first + offset) * x_row + channel, mask=mask, other=0.0)
        tl.store(ring + (start + offset) % (TAPS - 1) * channels, value, mask=mask)


def convolve_prompts(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Literal["silu"] | None,
    cache: torch.Tensor,
    step: StateMetadata,
    out: torch.Tensor,
) -> None:
    """The convolution of the rows behind the decode rows; writes their tokens in ``out``."""
    channels, taps = weight.shape
    rows, tiles = (step.query_start, step.blocks, step.starts), step.tiles
    _conv_tiles[(cdiv(channels, _CHANNELS), len(tiles.rows))](
        x, weight, weight if bias is None else bias, cache, out, *rows, *tiles, step.decode_rows, channels, x.stride(0),
        cache.stride(0), TAPS=taps, TOKENS=TILE, AT_ONCE=_AT_ONCE, CHANNELS=_CHANNELS, BIAS=bias is not None,
        SILU=activation == "silu", MODE=mode(x.device), num_warps=_WARPS, **options(x.device),
    )  # fmt: skip
    _keep_inputs[(cdiv(channels, _KEPT), step.prompt_rows)](
        x, cache, *rows, step.decode_rows, channels, x.stride(0), cache.stride(0), TAPS=taps, CHANNELS=_KEPT, num_warps=4,
        **options(x.device),
    )  # fmt: skip
