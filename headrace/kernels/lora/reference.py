"""Low-rank products segment by segment: the reference, and the implementation on CPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch


class Segment(NamedTuple):
    """Tokens ``[start, end)`` of a step, which have the adapter in one place."""

    start: int
    end: int
    place: int


@dataclasses.dataclass(frozen=True)
class LowRank:
    """The addition of adapters to the product of a layer, ``B low``, with the adapter of each token."""

    low: torch.Tensor
    """``[shares, T, width]`` float32: A's products, to be summed over shares; anything for tokens without an adapter."""
    b: torch.Tensor
    """``[places, N, rank]``, finite."""
    ends: Sequence[int]
    """End of the outputs of each part; ``low`` has the parts side by side, ``rank`` columns each."""
    segments: Sequence[Segment]
    """Runs of tokens with one adapter."""
    places: torch.Tensor | None
    """``[T]`` int32: token -> place of its adapter, or -1, in place of ``segments``, for the kernels of a GPU."""


def shrink(x: torch.Tensor, a: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor:
    """Returns A's products: see ``kernels.lora.shrink``."""
    low = torch.empty(1, len(x), a.shape[1], device=x.device)
    for start, end, place in segments:
        torch.mm(x[start:end].float(), a[place].float().mT, out=low[0, start:end])
    return low


def expand(added: LowRank, y: torch.Tensor) -> None:
    """Adds B's products in place: see ``kernels.lora.expand``."""
    rank = added.b.shape[2]
    for start, end, place in added.segments:
        first = 0
        for part, last in enumerate(added.ends):
            own = added.low[0, start:end, part * rank : (part + 1) * rank]
            y[start:end, first:last] += own @ added.b[place, first:last].float().mT
            first = last
