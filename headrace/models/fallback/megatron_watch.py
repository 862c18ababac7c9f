"""Whether somebody else's weights have changed since they were last looked at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WeightWatch:
    """Looks at the weights of a model that a trainer owns and writes when it likes.

    What is kept of them is the sum of their bits as integers, a number a tensor: reading them all once takes about as long
    as one decode step. Version counters of tensors would not do: trainers write through ``.data``, which has its own.

    Args:
        model: a module with all its weights on one device.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._places = self._where()
        self._sums = self._summed()

    def changed(self) -> bool:
        """Whether any value is another than when this was last asked."""
        sums = self._summed()
        changed = not torch.equal(sums, self._sums)
        self._sums = sums
        return changed

    def moved(self) -> bool:
        """Whether any weight is in other memory than at the beginning."""
        return self._where() != self._places

    def _tensors(self) -> Iterable[torch.Tensor]:
        yield from self._model.parameters()
        yield from self._model.buffers()

    def _where(self) -> list[int]:
        return [tensor.data_ptr() for tensor in self._tensors()]

    @torch.no_grad()
    def _summed(self) -> torch.Tensor:
        """``[tensors]`` int64, wrapped around."""
        return torch.stack([_bits(tensor).sum(dtype=torch.int64) for tensor in self._tensors()])


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
