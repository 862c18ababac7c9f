"""Log-probabilities of drawn tokens, of prompt tokens, and of the best tokens beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from headrace.core.plan import NewSequence
from headrace.kernels.transfer import upload
from headrace.outputs import TokenLogprobs
from headrace.sampling.device import Download
from headrace.sampling.draw import Drawn
from headrace.sampling.feature import Indices, Rows, take_rows
from headrace.sampling.vocabulary import block_maxima, candidates, log_sums

ALL = -1
_NOT_ASKED = -2
_SPARE = 8
"""Candidates beyond those asked for, so that of equals at the end the lowest ids are taken."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """Logprobs of P positions; ``best_*`` are ``[P, k]``, sorted by logprob, falling, then by token id."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    best_tokens: torch.Tensor
    best_logprobs: torch.Tensor

    def download(self, download: Download) -> Measured:
        return Measured(*(download.copy(getattr(self, field.name)) for field in dataclasses.fields(self)))

    def lists(self) -> list[TokenLogprobs]:
        """An entry a position; best tokens of no probability are left out."""
        columns = (self.tokens, self.logprobs, self.ranks, self.best_tokens, self.best_logprobs)
        counts = (self.best_logprobs > -torch.inf).sum(-1).tolist()
        return [
            TokenLogprobs([token, *tokens[:count]], [logprob, *logprobs[:count]], rank)
            for token, logprob, rank, tokens, logprobs, count in zip(*(c.tolist() for c in columns), counts, strict=True)
        ]


def measure(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> Measured:
    """Logprobs under the softmax of ``logits [P, vocab]`` float32 of ``tokens [P]`` and of the ``count`` best.

    A token's rank is one more than the number of tokens with a larger logit. ``count`` -1: the whole vocabulary.
    """
    total = log_sums(logits)
    own = logits.gather(1, tokens.unsqueeze(1))
    ranks = (logits > own).sum(-1, dtype=torch.int32) + 1
    count = logits.shape[1] if count == ALL else min(count, logits.shape[1])
    if count:
        values, best = candidates(logits, block_maxima(logits), min(count + _SPARE, logits.shape[1]))
        values, best = values[:, :count], best[:, :count]
    else:
        values, best = own[:, :0], tokens.unsqueeze(1)[:, :0]
    return Measured(tokens, (own - total).squeeze(1), ranks, best, values - total)


def measure_in_slices(
    logits_of: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, tokens: torch.Tensor, count: int, most: int
) -> list[Measured]:
    """``measure`` for prompt tokens: the logits of at most ``most`` positions exist at a time.

    Args:
        hidden: ``[P, hidden]``, of the positions before the tokens.
        tokens: ``[P]`` int64.
    """
    return [
        measure(logits_of(hidden[start : start + most]), tokens[start : start + most], count)
        for start in range(0, len(tokens), most)
    ]


class Logprobs:
    """Which slots asked for logprobs of their drawn tokens, how many, and of which distribution."""

    def __init__(self, num_slots: int) -> None:
        # Index space: slot.
        self._count = np.full(num_slots, _NOT_ASKED, dtype=np.int64)
        self._processed = np.zeros(num_slots, dtype=np.bool_)

    def add(self, slot: int, seq: NewSequence) -> None:
        if seq.sampling.logprobs is not None:
            self._count[slot] = seq.sampling.logprobs
            self._processed[slot] = seq.sampling.logprobs_mode == "processed"

    def remove(self, slot: int) -> None:
        self._count[slot] = _NOT_ASKED
        self._processed[slot] = False

    def wants_raw(self, rows: Rows) -> Indices:
        return np.flatnonzero((self._count[rows.slots] != _NOT_ASKED) & ~self._processed[rows.slots])

    def raw(self, rows: Rows, picked: Indices, logits: torch.Tensor, drawn: Drawn) -> list[tuple[Indices, Measured]]:
        """Of the untouched ``logits [len(picked), vocab]``. Index space of the answer: row."""
        return self._by_count(rows, picked, logits, take_rows(drawn.tokens, picked))

    def processed(
        self, rows: Rows, logits: torch.Tensor, drawn: Drawn, temperatures: torch.Tensor
    ) -> list[tuple[Indices, Measured]]:
        """Of what was drawn from: ``logits [N, vocab]`` after every processor, cut at the filters' floor, and tempered.

        Where temperature is 0 nothing is drawn: the logits after the processors count, as at temperature 1.
        """
        picked = np.flatnonzero((self._count[rows.slots] != _NOT_ASKED) & self._processed[rows.slots])
        if not len(picked):
            return []
        own = take_rows(logits, picked)
        tempered = take_rows(temperatures, picked).float()
        tempered = tempered.masked_fill(tempered <= 0, 1.0).unsqueeze(1)
        # Less the best, so that no quotient is beyond float32.
        scaled = (own - take_rows(drawn.best, picked).unsqueeze(1)).div_(tempered)
        scaled.masked_fill_(own < take_rows(drawn.floors, picked).unsqueeze(1), -torch.inf)
        return self._by_count(rows, picked, scaled, take_rows(drawn.tokens, picked))

    def _by_count(
        self, rows: Rows, picked: Indices, logits: torch.Tensor, tokens: torch.Tensor
    ) -> list[tuple[Indices, Measured]]:
        """Rows that ask for equally many go together: what a row gets never depends on what others ask for."""
        counts = self._count[rows.slots[picked]]
        answer = []
        for count in sorted({*counts.tolist()}):
            places = np.flatnonzero(counts == count)
            answer.append((picked[places], measure(take_rows(logits, places), take_rows(tokens, places), count)))
        return answer


def whole_rows(picked: Indices, logits: torch.Tensor) -> torch.Tensor:
    """A copy of the rows, which what happens to ``logits`` later does not touch."""
    return logits.index_select(0, upload(picked, logits.device))
