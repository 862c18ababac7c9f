"""Products of tokens with the low-rank matrices of their adapters, ``y += B (A x)``: ``shrink``, then ``expand``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from headrace.kernels import gpu
from headrace.kernels.lora import reference
from headrace.kernels.lora.reference import Factors, LowRank, Segment

if TYPE_CHECKING:
    from headrace.kernels.lora import triton as kernels
else:
    kernels = gpu.Late(f"{__name__}.triton")

STEP_SIZES = (64, 256, 2048, 4096)
"""Tokens of steps that take different kernels. Fewer tokens are those of decode steps, which are captured at the start."""

__all__ = ["STEP_SIZES", "Factors", "LowRank", "Segment", "expand", "expand_gated", "shrink", "shrink_rounded"]


def shrink(x: torch.Tensor, factors: Factors, *, batch_invariant: bool = False) -> LowRank:
    """Multiplies x ``[T, K]`` by A of each token's adapter.

    On a GPU the kernel runs while that of the layer's own product, which follows, begins to read weights.

    Args:
        batch_invariant: what a token gets does not depend on the others.
    """
    if factors.places is not None:
        return factors.added(kernels.shrink(x, factors.a, factors.places, batch_invariant=batch_invariant))
    return factors.added(reference.shrink(x, factors.a, factors.segments))


def shrink_rounded(x: torch.Tensor, a: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """``shrink`` of x in 16 bits on a GPU, in one share and rounded to x's dtype: ``[T, width]``."""
    return kernels.shrink_rounded(x, a, places)


def expand(added: LowRank, y: torch.Tensor, *, batch_invariant: bool = False) -> None:
    """Adds B's products to ``y [T, N]`` in place; tokens without an adapter stay bitwise the same. Sums are float32.

    Args:
        batch_invariant: as it was for ``shrink``.
    """
    if added.places is not None:
        kernels.expand(added, added.places, y, batch_invariant=batch_invariant)
    else:
        reference.expand(added, y)


def expand_gated(added: LowRank, y: torch.Tensor) -> torch.Tensor:
    """``silu_mul`` of y ``[1, 2n]`` and what ``expand`` adds to it, on a GPU: of two parts of n outputs, and products with A in
    one share."""
    return kernels.expand_gated(added, y)
