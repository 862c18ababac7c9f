"""Products of tokens with the low-rank matrices of their adapters."""

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

__all__ = ["Segment", "add_lora"]


def add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    ends: Sequence[int],
    segments: Sequence[Segment],
    places: torch.Tensor | None = None,
    *,
    batch_invariant: bool = False,
) -> None:
    """``y += B (A x)`` in place, with the adapter of each token; other tokens stay bitwise the same. Sums are float32.

    Args:
        y: ``[T, N]``
        x: ``[T, K]``
        a: ``[places, parts * rank, K]``
        b: ``[places, N, rank]``
        ends: end of the outputs of each part.
        segments: runs of tokens with one adapter.
        places: ``[T]`` int32: token -> place of its adapter, or -1, in place of ``segments``, for the kernels of a GPU.
        batch_invariant: what a token gets does not depend on the others.
    """
    if places is not None:
        kernels.add_lora(y, x, a, b, ends, places, batch_invariant=batch_invariant)
    else:
        reference.add_lora(y, x, a, b, ends, segments)
