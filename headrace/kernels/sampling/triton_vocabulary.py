"""Shared by the kernels over logits: chunk sizes, a row's slot and its best logit."""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = 4096
"""Logits of one program."""
BLOCK = 128
"""Logits of one partial result."""


@triton.jit
def of_slot(values, slots, row, WIDTH: tl.constexpr, COLUMN: tl.constexpr, SLOTS: tl.constexpr):
    """A row's value, or its slot's with SLOTS; padding rows read slot 0, and their tokens are discarded."""
    place = row
    if SLOTS:
        place = tl.maximum(tl.load(slots + row), 0).to(tl.int64)
    return tl.load(values + place * WIDTH + COLUMN)


@triton.jit
def best_of(peaks, row, CHUNKS: tl.constexpr, CHUNKS_P: tl.constexpr):
    """The largest logit of a row (inf if there is a NaN), the chunks' peaks, and the peaks with NaN as inf."""
    chunk = tl.arange(0, CHUNKS_P)
    peak = tl.load(peaks + row * CHUNKS + chunk, mask=chunk < CHUNKS, other=float("-inf"))
    whole = tl.where(peak != peak, float("inf"), peak)
    return tl.max(whole, 0), peak, whole
