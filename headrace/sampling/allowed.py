"""allowed_token_ids: bans every other token."""

from __future__ import annotations

import torch

from headrace.core.plan import NewSequence
from headrace.kernels.transfer import upload
from headrace.sampling.feature import LogitsRows
from headrace.sampling.token_lists import TokenLists


class AllowedTokens(TokenLists):
    param = "allowed_token_ids"

    def add(self, slot: int, seq: NewSequence) -> bool:
        if seq.sampling.allowed_token_ids is None:
            return False
        self.put(slot, seq.sampling.allowed_token_ids)
        return True

    def apply(self, logits: torch.Tensor, rows: LogitsRows) -> bool:
        if not len(picked := self.users(rows)):
            return False
        places, _ = self.places(picked, rows.slots[picked])
        flat = logits.view(-1)
        kept = flat[places]
        logits.index_fill_(0, upload(picked, logits.device), -torch.inf)
        flat[places] = kept
        return True
