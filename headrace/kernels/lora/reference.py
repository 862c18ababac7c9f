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


def shrink(x: torch.Tensor, a: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor:
    """Returns A's products: see ``kernels.lora.shrink``."""
    low = torch.empty(1, len(x), a.shape[1], device=x.device)
    for start, end, place in segments:
        torch.mm(x[start:end].float(), a[place].float().mT, out=low[0, start:end])
    return low


def expand(low: torch.Tensor, b: torch.Tensor, ends: Sequence[int], segments: Sequence[Segment], y: torch.Tensor) -> None:
    """Adds B's products in place: see ``kernels.lora.expand``."""
    rank = b.shape[2]
    for start, end, place in segments:
        first = 0
        for part, last in enumerate(ends):
            added = low[0, start:end, part * rank : (part + 1) * rank] @ b[place, first:last].float().mT
            y[start:end, first:last] += added
            first = last
