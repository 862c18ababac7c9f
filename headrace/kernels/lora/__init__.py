"""Products of tokens with the low-rank matrices of their adapters, ``y += B (A x)``: ``shrink``, then ``expand``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from headrace.kernels import gpu
from headrace.kernels.lora import reference
from headrace.kernels.lora.reference import Segment

if TYPE_CHECKING:
    from headrace.kernels.lora import triton as kernels
else:
    kernels = gpu.Late(f"{__name__}.triton")

__all__ = ["Segment", "expand", "shrink"]


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
        segments: runs of tokens with one adapter.
        places: ``[T]`` int32: token -> place of its adapter, or -1, in place of ``segments``, for the kernels of a GPU.
        batch_invariant: what a token gets does not depend on the others.

    Returns:
        ``[shares, T, width]`` float32, to be summed over shares; anything for tokens without an adapter.
    """
    if places is not None:
        return kernels.shrink(x, a, places, batch_invariant=batch_invariant)
    return reference.shrink(x, a, segments)


def expand(
    low: torch.Tensor,
    b: torch.Tensor,
    ends: Sequence[int],
    segments: Sequence[Segment],
    y: torch.Tensor,
    places: torch.Tensor | None = None,
    *,
    batch_invariant: bool = False,
) -> None:
    """``y += B low`` in place, with the adapter of each token; other tokens stay bitwise the same. Sums are float32.

    Args:
        low: as ``shrink`` returns it.
        b: ``[places, N, rank]``, finite.
        ends: end of the outputs of each part; ``low`` has the parts side by side, ``rank`` columns each.
        segments: as for ``shrink``.
        y: ``[T, N]``
        places: as for ``shrink``.
        batch_invariant: as it was for ``shrink``.
    """
    if places is not None:
        kernels.expand(low, b, ends, places, y, batch_invariant=batch_invariant)
    else:
        reference.expand(low, b, ends, segments, y)
