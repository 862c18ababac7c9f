"""allowed_token_ids: bans every other token."""

from __future__ import annotations

import torch

from headrace.core.plan import NewSequence
from headrace.sampling.feature import Feature, Indices, LogitsRows
from headrace.sampling.slot_masks import SlotMasks


class AllowedTokens(Feature):
    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(num_slots)
        self._masks = SlotMasks(num_slots, vocab_size, device, "allowed_token_ids")

    def add(self, slot: int, seq: NewSequence) -> bool:
        allowed = seq.sampling.allowed_token_ids
        if allowed is None:
            return False
        self._masks.put(slot, allowed, allowed=True)
        self.use(slot)
        return True

    def remove(self, slot: int) -> None:
        super().remove(slot)
        if not self._num_users:
            self._masks.forget()

    def apply(self, logits: torch.Tensor, rows: LogitsRows, users: Indices) -> bool:
        self._masks.apply(logits, users, rows.slots[users])
        return True
