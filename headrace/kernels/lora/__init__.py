"""Products of tokens with the low-rank matrices of their adapters."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headrace.kernels.lora import reference
from headrace.kernels.lora.reference import Segment

__all__ = ["Segment", "add_lora"]


def add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    ends: Sequence[int],
    segments: Sequence[Segment],
) -> None:
    """``y += B (A x)`` in place, with the adapter of each token; other tokens stay bitwise the same. Sums are float32.

    Args:
        y: ``[T, N]``
        x: ``[T, K]``
        a: ``[slots, parts * rank, K]``
        b: ``[slots, N, rank]``
        ends: end of the outputs of each part.
        segments: runs of tokens with one adapter.
    """
    reference.add_lora(y, x, a, b, ends, segments)
