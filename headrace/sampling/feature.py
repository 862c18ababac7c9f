"""Feature: the base class of sampling features, and the logits rows they act on."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import torch

from headrace.core.plan import NewSequence
from headrace.kernels.transfer import upload

Indices = npt.NDArray[np.int64]
_NO_ROWS: Indices = np.empty(0, dtype=np.int64)


@dataclasses.dataclass(frozen=True)
class LogitsRows:
    """The N logits rows of a step. Index space of ``logits`` and of everything here: logits row, ``[N]``."""

    slots: Indices
    num_outputs: Indices
    """Tokens generated before the one that is sampled: an upper bound while a step in flight may return fewer."""
    slots_device: torch.Tensor
    """``slots`` on the device, int64."""
    positions: torch.Tensor
    """int64: position of the sampled token in its sequence."""
    row: Indices
    """Index of the step's row that each belongs to, ascending; the logits rows of one row are consecutive positions."""

    def __len__(self) -> int:
        return len(self.slots)


class Feature:
    """One sampling feature: state per slot, and no work for rows that do not use it. No method waits for the device."""

    def __init__(self, num_slots: int) -> None:
        self._uses = np.zeros(num_slots, dtype=np.bool_)
        self._num_users = 0

    def add(self, slot: int, seq: NewSequence) -> bool:
        """Initialises the slot for its new sequence, which may already have outputs.

        Returns:
            Whether the feature applies to the sequence. A CUDA graph may sample rows to which no feature applies.
        """
        raise NotImplementedError

    def use(self, slot: int) -> None:
        """Marks the slot as a user of the feature."""
        self._num_users += not self._uses[slot]
        self._uses[slot] = True

    def users(self, rows: LogitsRows) -> Indices:
        """Indices, ascending, of the rows whose slot uses the feature."""
        return np.flatnonzero(self._uses[rows.slots]) if self._num_users else _NO_ROWS

    def remove(self, slot: int) -> None:
        """Clears the slot, also after ``add`` was cut short; no-op if its sequence does not use the feature."""
        self._num_users -= int(self._uses[slot])
        self._uses[slot] = False

    def apply(self, logits: torch.Tensor, rows: LogitsRows, users: Indices) -> bool:
        """Changes ``logits [N, vocab]`` float32 in place, of the rows of its users; returns True if it may have changed any.
        Called where there are users."""
        return False

    def update(self, rows: LogitsRows, users: Indices, tokens: torch.Tensor) -> None:
        """Updates the state of its users with the sampled ``tokens [N]`` int64. Called where there are users."""


def take_rows(tensor: torch.Tensor, picked: Indices) -> torch.Tensor:
    """``tensor[picked]``: the tensor itself where that is every row, else a copy."""
    if len(picked) == tensor.shape[0]:
        return tensor
    return tensor.index_select(0, upload(picked, tensor.device))
