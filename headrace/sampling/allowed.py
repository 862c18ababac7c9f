"""allowed_token_ids: bans every other token."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from headrace.core.plan import NewSequence
from headrace.errors import RequestError
from headrace.kernels.mask import apply_masks
from headrace.kernels.transfer import upload
from headrace.sampling.feature import Feature, LogitsRows


class AllowedTokens(Feature):
    """A token bitmask per slot: its memory and time depend on the vocabulary alone, not on the length of a request's list."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(num_slots)
        self._vocab_size = vocab_size
        self._device = device
        self._num_words = -(-vocab_size // 32)
        self._masks = torch.zeros(0, self._num_words, dtype=torch.int32, device=device)
        """``[slots, words]``, allocated with the first user."""
        self._last: tuple[list[int], torch.Tensor] | None = None
        """The list and the mask of the last request: its samples share the list."""

    def add(self, slot: int, seq: NewSequence) -> bool:
        """Raises: RequestError: an id is outside the vocabulary."""
        allowed = seq.sampling.allowed_token_ids
        if allowed is None:
            return False
        if self._last is None or self._last[0] is not allowed:
            self._last = allowed, upload(self._mask(allowed), self._device)
        if not len(self._masks):
            self._masks = torch.zeros(len(self._uses), self._num_words, dtype=torch.int32, device=self._device)
        self._masks[slot].copy_(self._last[1], non_blocking=True)
        self.use(slot)
        return True

    def remove(self, slot: int) -> None:
        super().remove(slot)
        if not self._num_users:
            self._last = None

    def _mask(self, allowed: list[int]) -> npt.NDArray[np.int32]:
        """``[words]``: bit b of word w is set if token 32 w + b is allowed."""
        ids = np.array(allowed, dtype=np.int64)
        if not 0 <= ids.min() <= ids.max() < self._vocab_size:
            message = f"allowed_token_ids has a token id outside the vocabulary of {self._vocab_size}"
            raise RequestError(message, "allowed_token_ids")
        bits = np.zeros(32 * self._num_words, dtype=np.uint8)
        bits[ids] = 1
        return np.packbits(bits, bitorder="little").view("<i4")

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> bool:
        if not len(picked := self.users(rows)):
            return False
        which = np.full(len(rows), -1, dtype=np.int32)
        which[picked] = np.arange(len(picked), dtype=np.int32)
        masks = self._masks.index_select(0, upload(rows.slots[picked], self._device))
        apply_masks(logits, masks, upload(which, self._device))
        return True
