"""logit_bias: added to the logits of chosen tokens."""

from __future__ import annotations

import torch

from headrace.core.plan import NewSequence
from headrace.sampling.feature import Rows, Users
from headrace.sampling.token_lists import TokenLists


class LogitBias:
    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._users = Users(num_slots)
        self._biases = TokenLists(vocab_size, device)

    def add(self, slot: int, seq: NewSequence) -> None:
        if bias := seq.sampling.logit_bias:
            self._biases.put(slot, bias.keys(), "logit_bias", list(bias.values()))
            self._users.add(slot)

    def remove(self, slot: int) -> None:
        self._users.discard(slot)
        self._biases.drop(slot)

    def apply(self, logits: torch.Tensor, rows: Rows) -> bool:
        if not self._users or not len(picked := self._users.among(rows)):
            return False
        places, values = self._biases.places(picked, rows.slots[picked])
        logits.view(-1).index_add_(0, places, values)
        return True

    def update(self, rows: Rows, tokens: torch.Tensor) -> None:
        """Nothing changes."""
