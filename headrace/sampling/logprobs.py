"""Log-probabilities of sampled tokens, of prompt tokens, and of the most likely tokens at their positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch

from headrace.core.plan import NewSequence
from headrace.outputs import TokenLogprobs
from headrace.sampling.device import to_host
from headrace.sampling.feature import Feature, Indices, LogitsRows, take_rows
from headrace.sampling.topk_topp import SampledTokens
from headrace.sampling.vocabulary import block_maxima, candidates, log_sums

ALL = -1
_NONE = -2
"""The slot's sequence requests no logprobs."""
_SPARE = 8
"""Candidates beyond those requested, so that among equal logits at the end the lowest ids are taken."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """Logprobs of P positions; ``best_*`` are ``[P, k]``, sorted by descending logprob, then by token id."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    best_tokens: torch.Tensor
    best_logprobs: torch.Tensor

    def to_host(self) -> Measured:
        """Copies everything to the host; readable once the device has reached this point of its stream."""
        return Measured(*(to_host(getattr(self, field.name)) for field in dataclasses.fields(self)))

    def lists(self) -> list[TokenLogprobs]:
        """One entry per position, without best tokens of probability 0."""
        columns = (self.tokens, self.logprobs, self.ranks, self.best_tokens, self.best_logprobs)
        counts = (self.best_logprobs > -torch.inf).sum(-1).tolist()
        return [
            TokenLogprobs([token, *tokens[:count]], [logprob, *logprobs[:count]], rank)
            for token, logprob, rank, tokens, logprobs, count in zip(*(c.tolist() for c in columns), counts, strict=True)
        ]


def measure(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> Measured:
    """Computes logprobs of ``tokens [P]`` and of the ``count`` best tokens under the softmax of ``logits [P, vocab]`` float32.

    A token's rank is one more than the number of tokens with a larger logit. ``count`` -1: the whole vocabulary.
    """
    total = log_sums(logits)
    chosen = logits.gather(1, tokens.unsqueeze(1))
    ranks = (logits > chosen).sum(-1, dtype=torch.int32) + 1
    count = logits.shape[1] if count == ALL else min(count, logits.shape[1])
    if count:
        values, best = candidates(logits, block_maxima(logits), min(count + _SPARE, logits.shape[1]))
        values, best = values[:, :count], best[:, :count]
    else:
        values, best = chosen[:, :0], tokens.unsqueeze(1)[:, :0]
    return Measured(tokens, (chosen - total).squeeze(1), ranks, best, values - total)


def measure_in_slices(
    logits_of: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, tokens: torch.Tensor, count: int, most: int
) -> list[Measured]:
    """Applies ``measure`` to prompt tokens, with the logits of at most ``most`` positions in memory at a time.

    Args:
        hidden: ``[P, hidden]``: hidden states of the positions before the tokens.
        tokens: ``[P]`` int64.
    """
    return [
        measure(logits_of(hidden[start : start + most]), tokens[start : start + most], count)
        for start in range(0, len(tokens), most)
    ]


class Logprobs(Feature):
    """Logprobs of sampled tokens: how many each slot requests, and of which distribution.

    Changes no logits. The sampler calls ``raw`` with the logits before the other features, and ``processed`` with those after.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        # Index space: slot.
        self._count = np.full(num_slots, _NONE, dtype=np.int64)
        self._processed = np.zeros(num_slots, dtype=np.bool_)

    def add(self, slot: int, seq: NewSequence) -> bool:
        if seq.sampling.logprobs is None:
            return False
        self._count[slot] = seq.sampling.logprobs
        self._processed[slot] = seq.sampling.logprobs_mode == "processed"
        return True

    def remove(self, slot: int) -> None:
        self._count[slot] = _NONE
        self._processed[slot] = False

    def wants_raw(self, rows: LogitsRows) -> Indices:
        return np.flatnonzero((self._count[rows.slots] != _NONE) & ~self._processed[rows.slots])

    def raw(
        self, rows: LogitsRows, picked: Indices, logits: torch.Tensor, sampled: SampledTokens
    ) -> list[tuple[Indices, Measured]]:
        """Logprobs of the model's ``logits [len(picked), vocab]``. Index space of the result: logits row."""
        return self._by_count(rows, picked, logits, take_rows(sampled.tokens, picked))

    def processed(
        self, rows: LogitsRows, logits: torch.Tensor, sampled: SampledTokens, temperatures: torch.Tensor
    ) -> list[tuple[Indices, Measured]]:
        """Logprobs of the sampled distribution: ``logits [N, vocab]`` after all features, filters and temperature.

        Temperature 0 counts as 1 here.
        """
        picked = np.flatnonzero((self._count[rows.slots] != _NONE) & self._processed[rows.slots])
        if not len(picked):
            return []
        values = take_rows(logits, picked)
        tempered = take_rows(temperatures, picked).float()
        tempered = tempered.masked_fill(tempered <= 0, 1.0).unsqueeze(1)
        # Relative to the best logit, so that no quotient overflows float32.
        scaled = (values - take_rows(sampled.best, picked).unsqueeze(1)).div_(tempered)
        scaled.masked_fill_(values < take_rows(sampled.cutoffs, picked).unsqueeze(1), -torch.inf)
        return self._by_count(rows, picked, scaled, take_rows(sampled.tokens, picked))

    def _by_count(
        self, rows: LogitsRows, picked: Indices, logits: torch.Tensor, tokens: torch.Tensor
    ) -> list[tuple[Indices, Measured]]:
        """Measures rows with the same count together: a row's result never depends on what other rows request."""
        counts = self._count[rows.slots[picked]]
        results = []
        for count in sorted({*counts.tolist()}):
            places = np.flatnonzero(counts == count)
            results.append((picked[places], measure(take_rows(logits, places), take_rows(tokens, places), count)))
        return results
