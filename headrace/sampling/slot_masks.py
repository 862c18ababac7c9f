"""SlotMasks: a token bitmask per slot."""

from __future__ import annotations

import numpy as np
import torch

from headrace.errors import RequestError
from headrace.kernels.sampling import apply_masks
from headrace.kernels.transfer import upload
from headrace.sampling.feature import Indices


class SlotMasks:
    """Masks of slots whose requests allow some tokens alone, or ban some.

    Memory and time depend on the vocabulary, not on the length of a request's list, which the samples of a request share.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device, param: str) -> None:
        """``param``: the request's parameter that lists the tokens."""
        self._num_slots = num_slots
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)
        self._device = device
        self._param = param
        self._masks = torch.zeros(0, self._num_words, dtype=torch.int32, device=device)
        """``[slots, words]`` as of ``apply_masks``; allocated with the first mask."""
        self._last: tuple[list[int], torch.Tensor] | None = None
        """The last list, and its mask."""

    def put(self, slot: int, tokens: list[int], *, allowed: bool) -> None:
        """Sets the slot's mask to these tokens, or to all but these.

        Raises:
            RequestError: an id is outside the vocabulary. On a GPU it would end the process, not the request.
        """
        if self._last is None or self._last[0] is not tokens:
            self._last = tokens, self._mask(tokens, allowed)
        if not len(self._masks):
            self._masks = torch.zeros(self._num_slots, self._num_words, dtype=torch.int32, device=self._device)
        self._masks[slot].copy_(self._last[1], non_blocking=True)

    def forget(self) -> None:
        """Drops the last list, when no slot has a mask."""
        self._last = None

    def _mask(self, tokens: list[int], allowed: bool) -> torch.Tensor:
        """``[words]``"""
        ids = np.array(tokens, dtype=np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < self._vocab_size:
            message = f"{self._param} has a token id outside the vocabulary of {self._vocab_size}"
            raise RequestError(message, self._param)
        bits = np.full(32 * self._num_words, not allowed)
        bits[ids] = allowed
        return upload(np.packbits(bits, bitorder="little").view("<i4"), self._device)

    def apply(self, logits: torch.Tensor, picked: Indices, slots: Indices) -> None:
        """Bans tokens in rows ``picked`` of ``logits [N, vocab]``, by the masks of ``slots``."""
        which = np.full(len(logits), -1, dtype=np.int32)
        which[picked] = np.arange(len(picked), dtype=np.int32)
        apply_masks(logits, self._masks.index_select(0, upload(slots, self._device)), upload(which, self._device))
