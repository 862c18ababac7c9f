"""logit_bias: adds to the logits of given tokens."""

from __future__ import annotations

import torch

from headrace.core.plan import NewSequence
from headrace.sampling.feature import Indices, LogitsRows
from headrace.sampling.token_lists import TokenLists


class LogitBias(TokenLists):
    param = "logit_bias"

    def add(self, slot: int, seq: NewSequence) -> bool:
        bias = seq.sampling.logit_bias
        if not bias:
            return False
        self.put(slot, bias.keys(), list(bias.values()))
        return True

    def apply(self, logits: torch.Tensor, rows: LogitsRows, users: Indices) -> bool:
        places, values = self.places(users, rows.slots[users])
        logits.view(-1).index_add_(0, places, values)
        return True
