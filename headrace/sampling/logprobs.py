"""Log-probabilities of sampled tokens, of prompt tokens, and of the most likely tokens at their positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
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
    kept: torch.Tensor | None = None
    """``[P, ceil(vocab / 8)]`` uint8: a set bit, the lowest first, is a token that was left to sample from."""
    vocab_size: int = 0
    """With ``kept``."""

    def to_host(self) -> Measured:
        """Copies everything to the host; readable once the device has reached this point of its stream."""
        best = to_host(self.best_tokens), to_host(self.best_logprobs)
        kept = None if self.kept is None else to_host(self.kept)
        return Measured(to_host(self.tokens), to_host(self.logprobs), to_host(self.ranks), *best, kept, self.vocab_size)

    def lists(self) -> list[TokenLogprobs]:
        """One entry per position, without best tokens of probability 0."""
        columns = (self.tokens, self.logprobs, self.ranks, self.best_tokens, self.best_logprobs)
        counts = (self.best_logprobs > -torch.inf).sum(-1).tolist()
        kept = [None] * len(counts) if self.kept is None else [_kept_ids(row, self.vocab_size) for row in self.kept.numpy()]
        return [
            TokenLogprobs([token, *tokens[:count]], [logprob, *logprobs[:count]], rank, ids)
            for token, logprob, rank, tokens, logprobs, count, ids in zip(
                *(c.tolist() for c in columns), counts, kept, strict=True
            )
        ]


def _kept_ids(bits: npt.NDArray[np.uint8], vocab_size: int) -> bytes:
    """``TokenLogprobs.sampled_from``"""
    ids = np.flatnonzero(np.unpackbits(bits, count=vocab_size, bitorder="little"))
    return b"" if len(ids) == vocab_size else ids.astype("<i4").tobytes()


def _packed(kept: torch.Tensor) -> torch.Tensor:
    """``Measured.kept`` of ``[P, vocab]`` bool."""
    whole = torch.nn.functional.pad(kept, (0, -kept.shape[1] % 8)).view(len(kept), -1, 8)
    places = torch.arange(8, dtype=torch.uint8, device=kept.device)
    return (whole.to(torch.uint8) << places).sum(-1, dtype=torch.uint8)


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


class SampledRows(NamedTuple):
    """The rows of a step once they are sampled. Index space: logits row, ``[N]``."""

    logits: torch.Tensor
    """``[N, vocab]`` float32, after all features."""
    sampled: SampledTokens
    temperatures: torch.Tensor
    """float32; 0 where the best token is taken."""

    def kept(self, picked: Indices) -> torch.Tensor:
        """``[len(picked), vocab]`` bool: the tokens that were left to sample from."""
        values, cutoffs = take_rows(self.logits, picked), take_rows(self.sampled.cutoffs, picked).unsqueeze(1)
        kept = (values >= cutoffs) & (values > -torch.inf)
        token = torch.zeros_like(kept).scatter_(1, take_rows(self.sampled.tokens, picked).unsqueeze(1), True)
        return torch.where(take_rows(self.temperatures, picked).unsqueeze(1) > 0, kept, token)


class Logprobs(Feature):
    """Logprobs of sampled tokens: how many each slot requests, and of which distribution.

    Changes no logits. The sampler calls ``raw`` with the logits before the other features, and ``processed`` with those after.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        # Index space: slot.
        self._count = np.full(num_slots, _NONE, dtype=np.int64)
        self._processed = np.zeros(num_slots, dtype=np.bool_)
        self._masks = np.zeros(num_slots, dtype=np.bool_)
        """The tokens that were left to sample from are requested."""

    def add(self, slot: int, seq: NewSequence) -> bool:
        if seq.sampling.logprobs is None:
            return False
        self._count[slot] = seq.sampling.logprobs
        self._processed[slot] = seq.sampling.logprobs_mode == "processed"
        self._masks[slot] = seq.sampling.return_sampling_mask
        return True

    def remove(self, slot: int) -> None:
        self._count[slot] = _NONE
        self._processed[slot] = self._masks[slot] = False

    def wants_raw(self, rows: LogitsRows) -> Indices:
        return np.flatnonzero((self._count[rows.slots] != _NONE) & ~self._processed[rows.slots])

    def raw(self, rows: LogitsRows, picked: Indices, logits: torch.Tensor, done: SampledRows) -> list[tuple[Indices, Measured]]:
        """Logprobs of the model's ``logits [len(picked), vocab]``. Index space of the result: logits row."""
        return self._by_request(rows, picked, logits, done)

    def processed(self, rows: LogitsRows, done: SampledRows) -> list[tuple[Indices, Measured]]:
        """Logprobs of the sampled distribution: over the tokens that were left, at the row's temperature."""
        picked = np.flatnonzero((self._count[rows.slots] != _NONE) & self._processed[rows.slots])
        if not len(picked):
            return []
        tempered = take_rows(done.temperatures, picked)
        tempered = tempered.masked_fill(tempered <= 0, 1.0).unsqueeze(1)
        # Relative to the best logit, so that no quotient overflows float32.
        best = take_rows(done.sampled.best, picked).unsqueeze(1)
        scaled = (take_rows(done.logits, picked) - best).div_(tempered)
        scaled.masked_fill_(~done.kept(picked), -torch.inf)
        return self._by_request(rows, picked, scaled, done)

    def _by_request(
        self, rows: LogitsRows, picked: Indices, logits: torch.Tensor, done: SampledRows
    ) -> list[tuple[Indices, Measured]]:
        """Measures rows that request the same together: a row's result never depends on what other rows request."""
        wanted = 2 * self._count[rows.slots[picked]] + self._masks[rows.slots[picked]]
        results = []
        for request in sorted({*wanted.tolist()}):
            places = np.flatnonzero(wanted == request)
            own, count = picked[places], request // 2
            measured = measure(take_rows(logits, places), take_rows(done.sampled.tokens, own), count)
            if request % 2:
                measured = dataclasses.replace(measured, kept=_packed(done.kept(own)), vocab_size=logits.shape[1])
            results.append((own, measured))
        return results
