"""Penalties on tokens that a sequence has seen.

Repetition: a token of prompt or output has its logit divided by the penalty if positive, else multiplied. Then frequency
is taken off tokens of the output as often as they came, and presence once.
"""

from __future__ import annotations

import numpy as np
import torch

from headrace.core.plan import NewSequence
from headrace.kernels.transfer import upload
from headrace.sampling.feature import Rows, Users, take_rows

_FIRST_CAPACITY = 4
_FIRST_WIDTH = 256


class Penalties:
    """Per slot that uses them, a histogram of the outputs and a list of all tokens seen.

    Only the tokens of the list are looked at, so a step costs what the sequences are long and not what the vocabulary is
    wide. Histograms are as wide as the vocabulary: only slots that use them have one, and they are made when needed.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._num_slots, self._vocab_size, self._device = num_slots, vocab_size, device
        self._users = Users(num_slots)
        self._place = np.zeros(num_slots, dtype=np.int64)
        """slot -> place, for users."""
        self._free: list[int] = []
        """Places that no slot has."""
        # Index space: place.
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        """How often each token came as an output: what came with the prompt is no count."""
        self._strengths = torch.zeros(0, 3, device=device)
        """Repetition, presence, frequency."""
        self._seen = torch.zeros(0, _FIRST_WIDTH, dtype=torch.int32, device=device)
        """Tokens of prompt and output, some more than once; beyond the list's length its first token again."""
        self._length = np.zeros(num_slots, dtype=np.int64)
        """Of the lists in ``seen``."""

    @property
    def nbytes(self) -> int:
        return self._counts.nbytes + self._strengths.nbytes + self._seen.nbytes

    def add(self, slot: int, seq: NewSequence) -> None:
        p = seq.sampling
        if p.repetition_penalty == 1.0 and p.presence_penalty == 0.0 and p.frequency_penalty == 0.0:
            return
        if not self._free:
            self._add_places()
        place = self._place[slot] = self._free.pop()
        self._users.add(slot)
        strengths = np.array([p.repetition_penalty, p.presence_penalty, p.frequency_penalty], dtype=np.float32)
        self._strengths[place].copy_(upload(strengths, self._device), non_blocking=True)
        seen = np.unique(np.array(seq.token_ids, dtype=np.int32))
        self._length[place] = len(seen)
        self._widen(len(seen))
        self._seen[place].fill_(int(seen[0]))
        self._seen[place, : len(seen)].copy_(upload(seen, self._device), non_blocking=True)
        outputs = upload(np.array(seq.token_ids[seq.prompt_len :], dtype=np.int64), self._device)
        self._counts[place].zero_().index_add_(0, outputs, torch.ones_like(outputs, dtype=torch.int32))

    def remove(self, slot: int) -> None:
        if slot in self._users:
            self._free.append(int(self._place[slot]))
            self._users.discard(slot)

    def apply(self, logits: torch.Tensor, rows: Rows) -> bool:
        if not self._users or not len(picked := self._users.among(rows)):
            return False
        places_host = self._place[rows.slots[picked]]
        places = upload(places_host, self._device)
        seen = self._seen[:, : int(self._length[places_host].max())].index_select(0, places).long()
        # A token that is listed twice is worked out twice, from the same logit, to the same value.
        own = seen + upload(picked * self._vocab_size, self._device).unsqueeze(1)
        counts = self._counts.view(-1)[seen + (places * self._vocab_size).unsqueeze(1)].float()
        repetition, presence, frequency = self._strengths[places].unsqueeze(1).unbind(-1)
        values = logits.view(-1)[own]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values = values - counts * frequency - counts.clamp(max=1.0) * presence
        logits.view(-1)[own] = values
        return True

    def update(self, rows: Rows, tokens: torch.Tensor) -> None:
        if not self._users or not len(picked := self._users.among(rows)):
            return
        places_host = self._place[rows.slots[picked]]
        self._widen(int(self._length[places_host].max()) + 1)
        ends = upload(places_host * self._seen.shape[1] + self._length[places_host], self._device)
        self._length[places_host] += 1
        places, own = upload(places_host, self._device), take_rows(tokens, picked)
        self._seen.view(-1).index_copy_(0, ends, own.int())
        ones = torch.ones(len(picked), dtype=torch.int32, device=self._device)
        self._counts.view(-1).index_add_(0, places * self._vocab_size + own, ones)

    def _add_places(self) -> None:
        old = len(self._counts)
        new = min(max(2 * old, _FIRST_CAPACITY), self._num_slots)
        self._counts = _extended(self._counts, new)
        self._strengths = _extended(self._strengths, new)
        self._seen = _extended(self._seen, new)
        self._free.extend(range(new - 1, old - 1, -1))

    def _widen(self, width: int) -> None:
        """Makes lists of this length fit."""
        old = self._seen.shape[1]
        if width > old:
            more = max(2 * old, width) - old
            self._seen = torch.cat((self._seen, self._seen[:, :1].expand(-1, more)), dim=1)


def _extended(tensor: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat((tensor, tensor.new_zeros(length - len(tensor), *tensor.shape[1:])))
