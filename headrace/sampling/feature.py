"""Feature: the base class of sampling features, and the logits rows they act on."""

from __future__ import annotations

import dataclasses
import functools

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
    """Tokens generated before the one that is sampled, drafts included."""
    slots_device: torch.Tensor
    """``slots`` on the device, int64."""
    positions: torch.Tensor
    """int64: position of the sampled token in its sequence."""
    row: Indices
    """Index of the step's row that each belongs to, ascending; the logits rows of one row are consecutive positions."""
    drafts: torch.Tensor | None = None
    """int64: the draft at ``positions``, which the row's next logits row takes for granted; undefined in the last logits row of
    a row. None: no row has drafts."""

    def __len__(self) -> int:
        return len(self.slots)

    @functools.cached_property
    def nth(self) -> Indices:
        """Place of each logits row in its row: the number of drafts before its token."""
        return np.arange(len(self)) - np.searchsorted(self.row, self.row)

    def drafts_before(self, picked: Indices) -> torch.Tensor:
        """``[len(picked), K]``: the drafts before the token of each picked logits row, in order; -1 where there are fewer."""
        if self.drafts is None:
            return self.positions.new_empty(len(picked), 0)
        nth = self.nth[picked]
        columns = np.arange(nth.max())
        places, absent = (picked - nth)[:, None] + columns, columns >= nth[:, None]
        device = self.drafts.device
        return self.drafts[upload(places * ~absent, device)].masked_fill_(upload(absent, device), -1)

    def kept(self, tokens: torch.Tensor) -> torch.Tensor | None:
        """``[N]`` bool: whether the sampled ``tokens [N]`` before each logits row in its row are its drafts. None: all are."""
        if self.drafts is None:
            return None
        right, kept = tokens == self.drafts, torch.ones_like(tokens, dtype=torch.bool)
        for nth in range(1, self.nth.max() + 1):
            places = upload(np.flatnonzero(self.nth == nth), tokens.device)
            kept.index_copy_(0, places, kept[places - 1] & right[places - 1])
        return kept


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

    def update(self, rows: LogitsRows, users: Indices, tokens: torch.Tensor, kept: torch.Tensor | None) -> None:
        """Updates the state of its users with the sampled ``tokens [N]`` int64. Called where there are users.

        Args:
            kept: ``[N]`` bool: the tokens that the sequences go on with, the first ones of each row; None: all.
        """


def take_rows(tensor: torch.Tensor, picked: Indices) -> torch.Tensor:
    """``tensor[picked]``: the tensor itself where that is every row, else a copy."""
    if len(picked) == tensor.shape[0]:
        return tensor
    return tensor.index_select(0, upload(picked, tensor.device))
