"""allowed_token_ids: every other token is banned."""

from __future__ import annotations

import torch

from headrace.core.plan import NewSequence
from headrace.kernels.transfer import upload
from headrace.sampling.feature import Rows, Users
from headrace.sampling.token_lists import TokenLists


class AllowedTokens:
    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._users = Users(num_slots)
        self._allowed = TokenLists(vocab_size, device)

    def add(self, slot: int, seq: NewSequence) -> None:
        if seq.sampling.allowed_token_ids is not None:
            self._allowed.put(slot, seq.sampling.allowed_token_ids, "allowed_token_ids")
            self._users.add(slot)

    def remove(self, slot: int) -> None:
        self._users.discard(slot)
        self._allowed.drop(slot)

    def apply(self, logits: torch.Tensor, rows: Rows) -> bool:
        if not self._users or not len(picked := self._users.among(rows)):
            return False
        places, _ = self._allowed.places(picked, rows.slots[picked])
        flat = logits.view(-1)
        kept = flat[places]
        logits.index_fill_(0, upload(picked, logits.device), -torch.inf)
        flat[places] = kept
        return True

    def update(self, rows: Rows, tokens: torch.Tensor) -> None:
        """Nothing changes."""
