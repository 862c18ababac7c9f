"""Splits of the channels that batch-invariant products in 16 bits sum. They depend on the weight's shape alone."""

from __future__ import annotations

from headrace.kernels.support import cdiv

STEP = 128
"""A split's channels are a multiple of this, but for the last one's: no tile takes channels of two."""
_OUTPUTS, _PROGRAMS, _LEAST_SPLIT = 64, 132, 512
"""Outputs of a tile and programs that fill an H200, by which channels are split; and channels of a split, at least."""


def splits_of(in_features: int, out_features: int) -> int:
    """Splits of the channels, whatever the number of rows. It settles the order of sums, so that it must not change from one
    launch to the next, nor from one GPU to another."""
    return max(1, min(in_features // _LEAST_SPLIT, round(_PROGRAMS / cdiv(out_features, _OUTPUTS))))


def span_of(in_features: int, splits: int) -> int:
    """Channels of a split."""
    return cdiv(cdiv(in_features, splits), STEP) * STEP
