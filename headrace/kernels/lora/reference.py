"""Low-rank products segment by segment: the reference, and the implementation on CPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch

PARTS = 3
"""Most fused matrices of a layer, for the kernels of a GPU."""


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


@dataclasses.dataclass(frozen=True)
class Factors:
    """The matrices of adapters of a layer, and the adapter of each token."""

    a: torch.Tensor
    """``[places, width, K]``, finite: the parts one below the other, ``rank`` rows each."""
    b: torch.Tensor
    ends: Sequence[int]
    segments: Sequence[Segment]
    places: torch.Tensor | None
    """This and the three before: as ``LowRank`` has them."""

    def added(self, low: torch.Tensor) -> LowRank:
        """The addition to the product of tokens whose products with A are ``low``."""
        return LowRank(low, self.b, self.ends, self.segments, self.places)


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
