"""Integers of 4 and 8 bits that checkpoints pack into 32-bit words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Index among the eight numbers of an AWQ word of the one at each of its 4-bit places, from the lowest."""


def unpack(words: torch.Tensor, bits: int, axis: Literal[0, 1], order: Sequence[int] | None = None) -> torch.Tensor:
    """Unpacks words along an axis and transposes the result where that axis is the first.

    Args:
        words: ``[A, B]`` int32.
        order: which number lies at each place of a word, from the lowest; None: in order.

    Returns:
        Unsigned numbers as uint8: ``[A, per * B]``, or for axis 0 ``[B, per * A]``.
    """
    words = words if axis == 1 else words.mT
    per = 32 // bits
    out = torch.empty(*words.shape, per, dtype=torch.uint8, device=words.device)
    # A place at a time: whole words beside each number would take four times its memory.
    for place, number in enumerate(order or range(per)):
        out[..., number] = (words >> (bits * place)) & (2**bits - 1)
    return out.flatten(1)
