"""min_tokens: bans tokens that end a sequence until it has generated enough."""

from __future__ import annotations

import numpy as np
import torch

from headrace.core.plan import NewSequence
from headrace.sampling.feature import Indices, LogitsRows
from headrace.sampling.token_lists import TokenLists


class MinTokens(TokenLists):
    param = "stop_token_ids"

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(num_slots, vocab_size, device)
        self._minimum = np.zeros(num_slots, dtype=np.int64)
        """Index space: slot."""

    def add(self, slot: int, seq: NewSequence) -> bool:
        if len(seq.token_ids) - seq.prompt_len >= seq.sampling.min_tokens:
            return False
        # An end-of-sequence token may lie outside the vocabulary; the model cannot emit it then.
        stops = {token for token in (*seq.eos_token_ids, *(seq.sampling.stop_token_ids or ())) if token < self._vocab_size}
        if not stops:
            return False
        self.put(slot, sorted(stops))
        self._minimum[slot] = seq.sampling.min_tokens
        return True

    def apply(self, logits: torch.Tensor, rows: LogitsRows, users: Indices) -> bool:
        picked = users[rows.num_outputs[users] < self._minimum[rows.slots[users]]]
        if not len(picked):
            return False
        places, _ = self.places(picked, rows.slots[picked])
        logits.view(-1).index_fill_(0, places, -torch.inf)
        return True
