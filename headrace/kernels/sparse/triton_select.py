"""Selection of key blocks by a share of the estimated attention. Reference: ``headrace.kernels.sparse.select``.

Nothing is sorted: a binary search finds the rank down to which blocks are kept. Ranks are all different: a block's estimate,
then, as the lower digits, its place from behind.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headrace.kernels.attention.triton_tile import find_row
from headrace.kernels.sparse.reference import PromptRows
from headrace.kernels.support import power_of_two
from headrace.kernels.triton_launch import launched
from headrace.kernels.triton_pdl import begin, options


@triton.jit
def _upstream_chunk(length):
    """Tokens of the chunks in which the published code takes a prompt."""
    padded = 2048
    while padded < length:
        padded = padded * 2
    return tl.maximum(tl.minimum(padded, (1 << 28) // padded), 2048)


@triton.jit
def _chosen(weights, threshold, own, lagging, BLOCKS_P: tl.constexpr, QUIRK: tl.constexpr):
    """Returns which blocks to keep, ``own`` the query block's. ``lagging``: keep those of the published code in a prompt's
    first chunk."""
    block = tl.arange(0, BLOCKS_P)
    total = tl.sum(weights, 0)
    need = tl.ceil(threshold.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
    lowest = 1
    if QUIRK:
        lowest = tl.where(lagging, 0, 1)
    kept = tl.sum(tl.where((block == own) | (block < lowest), weights, 0), 0)
    competing = (block >= lowest) & (block < own)
    rank = tl.where(competing, weights * BLOCKS_P + (BLOCKS_P - 1 - block), -1)
    # Ranks from ``low`` on suffice, and those from ``high`` on do not.
    high = tl.max(rank, 0) + 1
    low = high * 0
    none = high
    while low + 1 < high:
        middle = (low + high) // 2
        enough = kept + tl.sum(tl.where(rank >= middle, weights, 0), 0) >= need
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    cutoff = tl.where(kept >= need, none, low)
    chosen = competing & (rank >= cutoff)
    if QUIRK:
        following = tl.max(tl.where(rank < cutoff, rank, -1), 0)
        chosen = chosen | (competing & (rank == following) & lagging & (need > 0))
    chosen = chosen | (block == 0) | (block == own)
    last = tl.where(threshold >= 1.0, tl.where(total > 0, own, -1), -1)
    return chosen | (block <= last)


@launched(
    do_not_specialize=["num_rows", "width"], do_not_specialize_on_alignment=["types", "query_start", "seq_lens", "prompt_lens"]
)
def _select(
    sums,  # [N, H, width] float32
    thresholds,  # [H] float32
    types,  # [R, H] int8
    query_start,  # [R + 1] int32
    seq_lens,  # [R] int32
    prompt_lens,  # [R] int32, QUIRK only
    mask,  # [N, H, width] bool as bytes
    num_rows,
    width,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_P: tl.constexpr,
    QUIRK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    place = tl.program_id(0)
    head = tl.program_id(1)
    spot = place.to(tl.int64) * HEADS + head
    row, row_place = find_row(query_start, place, num_rows, 0, BLOCK)
    num_queries = tl.load(query_start + row + 1) - tl.load(query_start + row)
    first = (place - row_place) * BLOCK
    block = tl.arange(0, BLOCKS_P)
    chosen = block < 0
    if (first >= 0) & (first < num_queries) & (tl.load(types + row * HEADS + head) == 1):
        length = tl.load(seq_lens + row)
        own = (length - num_queries + first) // BLOCK
        shares = tl.load(sums + spot * width + block, mask=(block < width) & (block <= own), other=0.0)
        weights = tl.floor(shares * 134217728.0 + 0.5).to(tl.int64)
        lagging = own < _upstream_chunk(tl.load(prompt_lens + row)) // BLOCK if QUIRK else False
        chosen = _chosen(weights, tl.load(thresholds + head), own, lagging, BLOCKS_P, QUIRK)
    tl.store(mask + spot * width + block, chosen.to(tl.uint8), mask=block < width)


def select(
    sums: torch.Tensor, rows: PromptRows, *, threshold: float | torch.Tensor, prompt_lens: torch.Tensor | None = None
) -> torch.Tensor:
    """Kernel version of ``headrace.kernels.sparse.select``; it does not wait for the device.

    Args:
        sums: contiguous, in float32.
        rows: contiguous.
        threshold: contiguous, if it is a tensor.
    """
    places, num_heads, width = sums.shape
    query_start, seq_lens, types, _, block = rows
    if not isinstance(threshold, torch.Tensor):
        threshold = torch.full((num_heads,), threshold, dtype=torch.float32, device=sums.device)
    mask = torch.empty(sums.shape, dtype=torch.bool, device=sums.device)
    blocks = power_of_two(width)
    _select[(places, num_heads)](
        sums, threshold, types, query_start, seq_lens, seq_lens if prompt_lens is None else prompt_lens, mask.view(torch.uint8),
        len(seq_lens), width, HEADS=num_heads, BLOCK=block,
        BLOCKS_P=blocks, QUIRK=prompt_lens is not None, num_warps=min(8, max(1, blocks // 512)), **options(sums.device),
    )  # fmt: skip
    return mask
