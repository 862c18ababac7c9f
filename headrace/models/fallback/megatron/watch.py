"""Detects changes of a trainer's weights between generations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

_STEP = 0x1E3779B97F4A7C15
"""An odd number whose multiples have little in common."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightWatch:
    """Detects changes of the weights of a model that a trainer owns and updates at any time.

    Keeps a checksum of each tensor: the sums of its rows' and of its columns' bits as integers, each weighted by
    its index, so that moved values count as changes. Reading all weights takes about as long as two decode steps.
    Version counters of tensors do not suffice: trainers write through ``.data``, which has its own.

    Args:
        model: a module with all its weights on one device.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._places = self._where()
        self._sums = self._summed()

    def changed(self) -> bool:
        """Whether any value has changed since the last call."""
        sums = self._summed()
        changed = not torch.equal(sums, self._sums)
        self._sums = sums
        return changed

    def moved(self) -> bool:
        """Whether any weight has moved in memory since construction."""
        return self._where() != self._places

    def _tensors(self) -> Iterable[torch.Tensor]:
        yield from self._model.parameters()
        yield from self._model.buffers()

    def _where(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._tensors()]

    @torch.no_grad()
    def _summed(self) -> torch.Tensor:
        """``[tensors]`` int64, wrapped around."""
        return torch.stack([_mark(_bits(tensor)) for tensor in self._tensors()])


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """``[rows, columns]`` integers."""
    rows = len(tensor) if tensor.dim() > 1 else 1
    return tensor.detach().contiguous().view(rows, tensor.numel() // max(rows, 1)).view(_INTEGERS[tensor.element_size()])


def _mark(bits: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for axis in (0, 1):
        sums = bits.sum(dim=axis, dtype=torch.int64)
        total = total * _STEP + (sums * (_STEP * torch.arange(1, len(sums) + 1, device=bits.device))).sum()
    return total
