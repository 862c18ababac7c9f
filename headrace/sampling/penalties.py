"""Penalties on tokens of the prompt and the output.

Repetition: divides the logit of each token of prompt or output by the penalty if it is positive, else multiplies it. Then
the frequency penalty is subtracted for each occurrence in the output, and the presence penalty once.
"""

from __future__ import annotations

import numpy as np
import torch

from headrace.core.plan import NewSequence
from headrace.kernels.transfer import upload
from headrace.options import FLOAT32_MAX
from headrace.sampling.feature import Feature, Indices, LogitsRows, take_rows

_FIRST_CAPACITY = 4
_FIRST_WIDTH = 256


class Penalties(Feature):
    """Keeps a histogram of the outputs and a list of all tokens seen, for each slot that uses penalties.

    A step only touches the listed tokens, so its cost grows with the length of the sequences, not with the vocabulary.
    Histograms are as wide as the vocabulary: they are allocated on demand, for slots that use penalties.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        super().__init__(num_slots)
        self._num_slots, self._vocab_size, self._device = num_slots, vocab_size, device
        self._place = np.zeros(num_slots, dtype=np.int64)
        """slot -> place, for slots that use penalties."""
        self._free: list[int] = []
        """Places without a slot."""
        # Index space: place.
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        """Occurrences of each token in the output; the prompt does not count."""
        self._strengths = torch.zeros(0, 3, device=device)
        """Repetition, presence, frequency."""
        self._seen = torch.zeros(0, _FIRST_WIDTH, dtype=torch.int32, device=device)
        """Tokens of prompt and output, some more than once; padded with the list's first token."""
        self._lead = np.zeros(num_slots, dtype=np.int64)
        """Length of the list in ``_seen`` less the number of outputs. Index space: place."""

    @property
    def nbytes(self) -> int:
        return self._counts.nbytes + self._strengths.nbytes + self._seen.nbytes

    def add(self, slot: int, seq: NewSequence) -> bool:
        p = seq.sampling
        if p.repetition_penalty == 1.0 and p.presence_penalty == 0.0 and p.frequency_penalty == 0.0:
            return False
        if not self._free:
            self._add_places()
        place = self._place[slot] = self._free.pop()
        self.use(slot)
        strengths = np.array([p.repetition_penalty, p.presence_penalty, p.frequency_penalty], dtype=np.float32)
        self._strengths[place].copy_(upload(strengths, self._device), non_blocking=True)
        seen = np.unique(np.array(seq.token_ids, dtype=np.int32))
        self._lead[place] = len(seen) - (len(seq.token_ids) - seq.prompt_len)
        self._widen(len(seen))
        self._seen[place].fill_(int(seen[0]))
        self._seen[place, : len(seen)].copy_(upload(seen, self._device), non_blocking=True)
        outputs = upload(np.array(seq.token_ids[seq.prompt_len :], dtype=np.int64), self._device)
        self._counts[place].zero_().index_add_(0, outputs, torch.ones_like(outputs, dtype=torch.int32))
        return True

    def remove(self, slot: int) -> None:
        if self._uses[slot]:
            self._free.append(int(self._place[slot]))
        super().remove(slot)

    def apply(self, logits: torch.Tensor, rows: LogitsRows, users: Indices) -> bool:
        places_host = self._place[rows.slots[users]]
        places = upload(places_host, self._device)
        lengths = self._lead[places_host] + rows.num_outputs[users]
        seen = self._seen[:, : int(lengths.max())].index_select(0, places).long()
        drafts = rows.drafts_before(users)
        seen = torch.cat((seen, torch.where(drafts < 0, seen[:, :1], drafts)), dim=1)
        # A token listed twice is computed twice, from the same logit, with the same result.
        flat = seen + upload(users * self._vocab_size, self._device).unsqueeze(1)
        counts = self._counts.view(-1)[seen + (places * self._vocab_size).unsqueeze(1)].float()
        for draft in drafts.unbind(1):
            counts += seen == draft.unsqueeze(1)
        repetition, presence, frequency = self._strengths[places].unsqueeze(1).unbind(-1)
        logit = logits.view(-1)[flat]
        values = torch.where(logit > 0, logit / repetition, logit * repetition)
        values = values - counts * frequency - counts.clamp(max=1.0) * presence
        # A penalty bans no token and makes none certain, however strong it is: only a banned one stays at -inf.
        values.clamp_(-FLOAT32_MAX, FLOAT32_MAX).masked_fill_(logit == -torch.inf, -torch.inf)
        logits.view(-1)[flat] = values
        return True

    def update(self, rows: LogitsRows, users: Indices, tokens: torch.Tensor, kept: torch.Tensor | None) -> None:
        places_host = self._place[rows.slots[users]]
        ends = self._lead[places_host] + rows.num_outputs[users]
        self._widen(int(ends.max()) + 1)
        places, sampled = upload(places_host, self._device), take_rows(tokens, users)
        count = torch.ones(len(users), dtype=torch.int32, device=self._device)
        listed = sampled.int()
        if kept is not None:
            # Later steps write over what is not kept here.
            count = take_rows(kept, users).int()
            listed = torch.where(count > 0, listed, self._seen[places, 0])
        self._seen.view(-1).index_copy_(0, upload(places_host * self._seen.shape[1] + ends, self._device), listed)
        self._counts.view(-1).index_add_(0, places * self._vocab_size + sampled, count)

    def _add_places(self) -> None:
        old = len(self._counts)
        new = min(max(2 * old, _FIRST_CAPACITY), self._num_slots)
        # All or none: memory may run out at any of them.
        extended = [_extended(tensor, new) for tensor in (self._counts, self._strengths, self._seen)]
        self._counts, self._strengths, self._seen = extended
        self._free.extend(range(new - 1, old - 1, -1))

    def _widen(self, width: int) -> None:
        """Makes room for lists of this length."""
        old = self._seen.shape[1]
        if width > old:
            more = max(2 * old, width) - old
            self._seen = torch.cat((self._seen, self._seen[:, :1].expand(-1, more)), dim=1)


def _extended(tensor: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat((tensor, tensor.new_zeros(length - len(tensor), *tensor.shape[1:])))
