"""What a sampling feature is: an object with state per slot, and nothing to do for rows that do not use it."""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from headrace.core.plan import NewSequence
from headrace.kernels.transfer import upload

Indices = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Rows:
    """The N rows of a step that draw a token. Index space of ``logits`` and of everything here: row, ``[N]``."""

    slots: Indices
    num_outputs: Indices
    """Tokens generated so far."""
    slots_device: torch.Tensor
    """``slots`` on the device, int64."""
    positions: torch.Tensor
    """int64: where in its sequence the drawn token will stand."""

    def __len__(self) -> int:
        return len(self.slots)


class Feature(Protocol):
    """One sampling feature. No method waits for the device."""

    def add(self, slot: int, seq: NewSequence) -> None:
        """A sequence took the slot; it may bring outputs. Raises RequestError if it cannot be served."""
        ...

    def remove(self, slot: int) -> None:
        """The slot's sequence is gone; afterwards nothing of it is left. No-op for a slot that does not use this."""
        ...

    def apply(self, logits: torch.Tensor, rows: Rows) -> bool:
        """Changes ``logits [N, vocab]`` float32 in place; True if it may have changed any."""
        ...

    def update(self, rows: Rows, tokens: torch.Tensor) -> None:
        """Takes note of the drawn ``tokens [N]`` int64."""
        ...


class Users:
    """The slots that use a feature."""

    def __init__(self, num_slots: int) -> None:
        self._mask = np.zeros(num_slots, dtype=np.bool_)
        self._count = 0

    def __contains__(self, slot: int) -> bool:
        return bool(self._mask[slot])

    def __bool__(self) -> bool:
        return self._count > 0

    def add(self, slot: int) -> None:
        self._count += not self._mask[slot]
        self._mask[slot] = True

    def discard(self, slot: int) -> None:
        self._count -= int(self._mask[slot])
        self._mask[slot] = False

    def among(self, rows: Rows) -> Indices:
        """The rows, ascending, whose slot is in the set."""
        return np.flatnonzero(self._mask[rows.slots])


def take_rows(tensor: torch.Tensor, picked: Indices) -> torch.Tensor:
    """``tensor[picked]``: the tensor itself where that is every row, else a copy."""
    if len(picked) == tensor.shape[0]:
        return tensor
    return tensor.index_select(0, upload(picked, tensor.device))
