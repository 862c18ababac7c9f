"""min_tokens: tokens that end a sequence are banned until it has generated enough."""

from __future__ import annotations

import numpy as np
import torch

from headrace.core.plan import NewSequence
from headrace.sampling.feature import Rows, Users
from headrace.sampling.token_lists import TokenLists


class MinTokens:
    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._users = Users(num_slots)
        self._stops = TokenLists(vocab_size, device)
        self._vocab_size = vocab_size
        self._minimum = np.zeros(num_slots, dtype=np.int64)
        """Index space: slot."""

    def add(self, slot: int, seq: NewSequence) -> None:
        stops = {*seq.eos_token_ids, *(seq.sampling.stop_token_ids or ())}
        # The model cannot emit a stop token outside its vocabulary.
        stops = {token for token in stops if token < self._vocab_size}
        if stops and len(seq.token_ids) - seq.prompt_len < seq.sampling.min_tokens:
            self._stops.put(slot, sorted(stops), "stop_token_ids")
            self._minimum[slot] = seq.sampling.min_tokens
            self._users.add(slot)

    def remove(self, slot: int) -> None:
        self._users.discard(slot)
        self._stops.drop(slot)

    def apply(self, logits: torch.Tensor, rows: Rows) -> bool:
        if not self._users:
            return False
        picked = self._users.among(rows)
        picked = picked[rows.num_outputs[picked] < self._minimum[rows.slots[picked]]]
        if not len(picked):
            return False
        places, _ = self._stops.places(picked, rows.slots[picked])
        logits.view(-1).index_fill_(0, places, -torch.inf)
        return True

    def update(self, rows: Rows, tokens: torch.Tensor) -> None:
        """Nothing changes: rows know how many tokens they have generated."""
