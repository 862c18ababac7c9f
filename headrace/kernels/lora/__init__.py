"""Products of tokens with the low-rank matrices of their adapters, ``y += B (A x)``: ``shrink``, then ``expand``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from headrace.kernels import gpu
from headrace.kernels.lora import reference
from headrace.kernels.lora.reference import ExpertFactors, LowRank, Segment

if TYPE_CHECKING:
    from headrace.kernels.lora import triton as kernels
else:
    kernels = gpu.Late(f"{__name__}.triton")

STEP_SIZES = (64, 256, 2048, 4096)
"""Tokens of steps that take different kernels. Fewer tokens are those of decode steps, which are captured at the start."""

__all__ = ["STEP_SIZES", "ExpertFactors", "LowRank", "Segment", "expand", "shrink"]


def shrink(
    x: torch.Tensor,
    a: torch.Tensor,
    segments: Sequence[Segment],
    places: torch.Tensor | None = None,
    *,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """``A x`` with the adapter of each token.

    Args:
        x: ``[T, K]``
        a: ``[places, width, K]``, finite.
        segments, places: as ``LowRank`` has them.
        batch_invariant: what a token gets does not depend on the others.

    Returns:
        ``LowRank.low``
    """
    if places is not None:
        return kernels.shrink(x, a, places, batch_invariant=batch_invariant)
    return reference.shrink(x, a, segments)


def expand(added: LowRank, y: torch.Tensor, *, batch_invariant: bool = False) -> None:
    """Adds B's products to ``y [T, N]`` in place; tokens without an adapter stay bitwise the same. Sums are float32.

    Args:
        batch_invariant: as it was for ``shrink``.
    """
    if added.places is not None:
        kernels.expand(added, added.places, y, batch_invariant=batch_invariant)
    else:
        reference.expand(added, y)
