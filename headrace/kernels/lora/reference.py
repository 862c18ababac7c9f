"""Low-rank products segment by segment: the reference, and the implementation on CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Segment(NamedTuple):
    """Tokens ``[start, end)`` of a step, which have the adapter in one place."""

    start: int
    end: int
    place: int


def add_lora(
    y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, ends: Sequence[int], segments: Sequence[Segment]
) -> None:
    """Adds the products in place: see ``kernels.lora.add_lora``."""
    rank = b.shape[2]
    for start, end, place in segments:
        low = x[start:end].float() @ a[place].float().mT
        first = 0
        for part, last in enumerate(ends):
            added = low[:, part * rank : (part + 1) * rank] @ b[place, first:last].float().mT
            y[start:end, first:last] += added
            first = last
