"""Penalties on tokens that a sequence has seen, from histograms of its prompt and of its outputs.

Repetition: a token of prompt or output has its logit divided by the penalty if positive, else multiplied. Then presence
is taken off tokens of the output once, frequency as often as they came.
"""

from __future__ import annotations

import numpy as np
import torch

from headrace.core.plan import NewSequence
from headrace.sampling.device import upload
from headrace.sampling.feature import Indices, Rows, Users, take_rows

_FIRST_CAPACITY = 4


class Penalties:
    """Histograms are as wide as the vocabulary, so only slots that use them have one, and they are made when needed."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._num_slots, self._vocab_size, self._device = num_slots, vocab_size, device
        self._users = Users(num_slots)
        self._repeating = Users(num_slots)
        self._counting = Users(num_slots)
        self._place = np.full(num_slots, -1, dtype=np.int64)
        """slot -> its histogram."""
        self._free: list[int] = []
        # Index space: histogram.
        self._in_prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        """How often each token came as an output."""
        self._strengths = torch.zeros(0, 3, device=device)
        """Repetition, presence, frequency."""

    @property
    def nbytes(self) -> int:
        return self._in_prompt.nbytes + self._counts.nbytes + self._strengths.nbytes

    def add(self, slot: int, seq: NewSequence) -> None:
        p = seq.sampling
        repeats, counts = p.repetition_penalty != 1.0, p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
        if not (repeats or counts):
            return
        if not self._free:
            self._grow()
        place = self._place[slot] = self._free.pop()
        self._users.add(slot)
        if repeats:
            self._repeating.add(slot)
        if counts:
            self._counting.add(slot)
        strengths = np.array([p.repetition_penalty, p.presence_penalty, p.frequency_penalty], dtype=np.float32)
        self._strengths[place].copy_(upload(strengths, self._device), non_blocking=True)
        tokens = upload(np.array(seq.token_ids, dtype=np.int64), self._device)
        self._in_prompt[place].zero_().index_fill_(0, tokens[: seq.prompt_len], True)
        outputs = tokens[seq.prompt_len :]
        self._counts[place].zero_().index_add_(0, outputs, torch.ones_like(outputs, dtype=torch.int32))

    def remove(self, slot: int) -> None:
        if slot in self._users:
            self._free.append(int(self._place[slot]))
            self._place[slot] = -1
            for users in (self._users, self._repeating, self._counting):
                users.discard(slot)

    def apply(self, logits: torch.Tensor, rows: Rows) -> bool:
        if not self._users:
            return False
        repeating, counting = self._repeating.among(rows), self._counting.among(rows)
        if len(repeating):
            self._repeat(logits, repeating, self._places(rows, repeating))
        if len(counting):
            self._count(logits, counting, self._places(rows, counting))
        return bool(len(repeating) or len(counting))

    def update(self, rows: Rows, tokens: torch.Tensor) -> None:
        if self._users and len(picked := self._users.among(rows)):
            places = self._places(rows, picked)
            ones = torch.ones(len(picked), dtype=torch.int32, device=self._device)
            self._counts.view(-1).index_add_(0, places * self._vocab_size + take_rows(tokens, picked), ones)

    def _places(self, rows: Rows, picked: Indices) -> torch.Tensor:
        return upload(self._place[rows.slots[picked]], self._device)

    def _repeat(self, logits: torch.Tensor, picked: Indices, places: torch.Tensor) -> None:
        strength = self._strengths[places, :1]
        seen = self._counts[places].gt(0).logical_or_(self._in_prompt[places])
        own = take_rows(logits, picked)
        changed = torch.where(own > 0, own / strength, own * strength)
        _put_rows(logits, picked, torch.where(seen, changed, own))

    def _count(self, logits: torch.Tensor, picked: Indices, places: torch.Tensor) -> None:
        _, presence, frequency = self._strengths[places].unsqueeze(1).unbind(-1)
        counts = self._counts[places].float()
        own = take_rows(logits, picked)
        # In this order, whatever the device fuses: first all counts' worth, then the one for being there.
        _put_rows(logits, picked, own - counts * frequency - counts.clamp(max=1.0) * presence)

    def _grow(self) -> None:
        old = len(self._counts)
        new = min(max(2 * old, _FIRST_CAPACITY), self._num_slots)
        self._in_prompt = _extended(self._in_prompt, new)
        self._counts = _extended(self._counts, new)
        self._strengths = _extended(self._strengths, new)
        self._free.extend(range(new - 1, old - 1, -1))


def _put_rows(logits: torch.Tensor, picked: Indices, values: torch.Tensor) -> None:
    if len(picked) == len(logits):
        logits.copy_(values)
    else:
        logits.index_copy_(0, upload(picked, logits.device), values)


def _extended(tensor: torch.Tensor, length: int) -> torch.Tensor:
    return torch.cat((tensor, tensor.new_zeros(length - len(tensor), *tensor.shape[1:])))
