"""TopKTopPSampler: temperature, min_p, top_k and top_p, then one random number for each row.

The filters are defined without reference to an order, so that they treat equal logits alike:

* top_k keeps a token if fewer than k tokens have a larger logit;
* min_p keeps a token if its probability is at least ``min_p`` times the best one's;
* top_p keeps, of the tokens that the other two keep, those for which larger logits have less than ``top_p`` of the mass.

The random number then selects by the cumulative probability of the kept tokens in the order of their ids, so the result does
not depend on how the kept tokens were found.

Where Triton kernels run, they find the smallest kept logit and sample (``headrace.kernels.sampling``). Elsewhere, each filter
keeps whole logit values from the top down, so a bounded set of candidates suffices as soon as it contains a value that is
dropped. The host checks that; a row whose candidates do not suffice is sampled again from all its tokens. On a device without
Triton the host cannot check without waiting: candidates beyond the set are dropped there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from headrace.core.plan import NewSequence
from headrace.kernels import gpu, sampling
from headrace.kernels.transfer import upload
from headrace.sampling.feature import Indices, LogitsRows, take_rows
from headrace.sampling.random import seed_words, uniform
from headrace.sampling.vocabulary import argmax, block_maxima, block_sums, candidates, pick, pick_wide
from headrace.sampling_params import SamplingParams

_FEWEST = 64
"""Smallest number of candidates."""
_SPARE = 8
"""Candidates beyond top_k, so that a few logits equal to the last one fit in."""
_MOST = 1024
"""Above this many candidates it is faster to use all tokens than to find the best ones."""
_BINS = 2048
_BINS_A_NEPER = 64
"""Resolution of the histogram in which a cutoff is searched: bins per factor e of the weight."""

GREEDY, TOP_1, PLAIN, FILTERED = 0, 1, 2, 3


class SampledTokens(NamedTuple):
    """Per row, ``[N]``."""

    tokens: torch.Tensor
    """int64; any token where ``best`` is not finite."""
    best: torch.Tensor
    """The row's largest logit, float32: NaN if there is a NaN, -inf if every token is banned."""
    cutoffs: torch.Tensor
    """The smallest logit that the filters keep, float32; -inf without filters."""


class TopKTopPSampler:
    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        # Index space: slot.
        self._kind = np.zeros(num_slots, dtype=np.int8)
        self._width = np.zeros(num_slots, dtype=np.int64)
        """Candidates of the first attempt."""
        self._by_mass = np.zeros(num_slots, dtype=np.bool_)
        """top_p is the only filter, so it needs the mass of the whole vocabulary."""
        self.params = torch.zeros(num_slots, 4, dtype=torch.float64, device=device)
        """Requested temperature, top_k (vocab_size: no limit), top_p, min_p."""
        self.temperatures = torch.zeros(num_slots, dtype=torch.float32, device=device)
        """0 where the best token is always taken."""
        self.keys = torch.zeros(num_slots, 3, dtype=torch.int64, device=device)
        """Low and high word of the seed, and the sample's index."""
        self._added: dict[int, tuple[float, tuple[float, ...], tuple[int, ...]]] = {}
        """slot -> its rows of ``temperatures``, ``params`` and ``keys``, which are not on their way yet."""

    def add(self, slot: int, seq: NewSequence) -> None:
        p = seq.sampling
        limited = 0 < p.top_k < self._vocab_size
        top_k = p.top_k if limited else self._vocab_size
        # At this temperature, different float32 logits already have probabilities 1 and 0.
        temperature = max(p.temperature, 1e-30) if p.temperature else 0.0
        filtered = limited or p.top_p < 1.0 or p.min_p > 0.0
        self._kind[slot] = _kind_of(p, filtered)
        self._width[slot] = self._first_width(top_k)
        self._by_mass[slot] = not limited and p.top_p < 1.0 and p.min_p == 0.0
        used = 0.0 if self._kind[slot] in (GREEDY, TOP_1) else temperature
        filters = (temperature, top_k, p.top_p, p.min_p)
        self._added[slot] = used, filters, (*seed_words(seq.seed), seq.sample_index)

    def send(self) -> None:
        """Sends the rows of slots that were added since the last call, in one transfer."""
        if not self._added:
            return
        temperatures, params, keys = zip(*self._added.values(), strict=True)
        floats = np.column_stack((temperatures, params)).astype(np.float64)
        words = np.column_stack((list(self._added), keys, floats.view(np.int64)))
        sent = upload(words, self._device)
        slots, floating = sent[:, 0], sent[:, 4:].view(torch.float64)
        self.keys.index_copy_(0, slots, sent[:, 1:4])
        self.temperatures.index_copy_(0, slots, floating[:, 0].float())
        self.params.index_copy_(0, slots, floating[:, 1:])
        self._added.clear()

    def remove(self, slot: int) -> None:
        """Makes the slot one that takes the best token."""
        self._kind[slot] = GREEDY

    def filters(self, slots: Indices) -> bool:
        """True if filters restrict any of the slots; taking the best token does not count as a filter."""
        return bool((self._kind[slots] == FILTERED).any())

    def _first_width(self, top_k: int) -> int:
        width = _FEWEST
        while width < top_k + _SPARE:
            width *= 2
        return width if width <= _MOST or self._device.type != "cpu" else _FEWEST

    def sample(self, logits: torch.Tensor, rows: LogitsRows, maxima: torch.Tensor | None = None) -> SampledTokens:
        """Samples a token for each row of ``logits [N, vocab]`` float32. ``maxima``: their ``block_maxima``, if known."""
        self.send()
        if gpu.takes(logits):
            return self._sample_by_kernels(logits, rows)
        maxima = block_maxima(logits) if maxima is None else maxima
        sampled = _PartialSample(logits, maxima, *argmax(logits, maxima))
        kinds = self._kind[rows.slots]
        if not kinds.any():
            return sampled.result()
        if len(picked := np.flatnonzero(kinds == TOP_1)):
            sampled.limit(picked, take_rows(sampled.best, picked))
        params = self.params[rows.slots_device]
        numbers = uniform(self.keys[rows.slots_device], rows.positions)
        if len(picked := np.flatnonzero(kinds == PLAIN)):
            sampled.put(picked, pick_wide(_weights(sampled, picked, params), take_rows(numbers, picked)))
        widths = np.where(kinds == FILTERED, self._width[rows.slots], 0)
        if widths.any():
            mass = self._mass(sampled, np.flatnonzero((kinds == FILTERED) & self._by_mass[rows.slots]), params)
            for width in sorted({*widths.tolist()} - {0}):
                self._filtered(sampled, np.flatnonzero(widths == width), (params, mass, numbers), width)
        return sampled.result()

    def _sample_by_kernels(self, logits: torch.Tensor, rows: LogitsRows) -> SampledTokens:
        """Samples all rows at once, without waiting for the device."""
        kinds = self._kind[rows.slots]
        filters = self.params if bool(((kinds == TOP_1) | (kinds == FILTERED)).any()) else None
        state = (self.temperatures, self.keys, rows.positions, rows.slots_device, filters) if kinds.any() else ()
        sampled = sampling.kernels.sample(logits, *state)
        cutoffs = torch.full_like(sampled.best, -torch.inf) if sampled.cutoffs is None else sampled.cutoffs
        return SampledTokens(sampled.tokens, sampled.best, cutoffs)

    def _mass(self, sampled: _PartialSample, picked: Indices, params: torch.Tensor) -> torch.Tensor:
        """``[N]`` float64: total weight of the vocabulary for ``picked`` rows, NaN for others."""
        mass = torch.full((len(params),), torch.nan, dtype=torch.float64, device=self._device)
        if len(picked):
            mass.index_copy_(0, upload(picked, self._device), block_sums(_weights(sampled, picked, params)).sum(-1))
        return mass

    def _filtered(self, sampled: _PartialSample, picked: Indices, inputs: tuple[torch.Tensor, ...], width: int) -> None:
        """Samples rows from ``width`` candidates, and from all tokens where the candidates do not suffice.

        ``inputs``: params ``[N, 4]``, mass ``[N]`` and numbers ``[N]`` of all rows.
        """
        logits, maxima = take_rows(sampled.logits, picked), take_rows(sampled.maxima, picked)
        params, mass, numbers = (take_rows(tensor, picked) for tensor in inputs)
        values, tokens = candidates(logits, maxima, min(width, self._vocab_size))
        weights, cutoffs, suffices = keep(values, params, mass)
        tokens, order = tokens.sort(dim=-1)
        sampled.put(picked, tokens.gather(1, pick(weights.gather(1, order), numbers).unsqueeze(1)).squeeze(1))
        sampled.limit(picked, cutoffs)
        if width < self._vocab_size and self._device.type == "cpu":
            for place in np.flatnonzero(~suffices.numpy()).tolist():
                self._from_all(sampled, picked[place : place + 1], inputs[0], inputs[2])

    def _from_all(self, sampled: _PartialSample, picked: Indices, params: torch.Tensor, numbers: torch.Tensor) -> None:
        """Samples one row from all its tokens."""
        row = int(picked[0])
        weights = _weights(sampled, picked, params)
        cutoff = cutoff_of(sampled.logits[row], weights[0], params[row].tolist())
        weights.masked_fill_(sampled.logits[row] < cutoff, 0.0)
        sampled.put(picked, pick_wide(weights, numbers[row : row + 1]))
        sampled.limit(picked, cutoff.unsqueeze(0))


def _kind_of(params: SamplingParams, filtered: bool) -> int:
    if params.temperature == 0.0:
        return GREEDY
    if params.greedy:
        return TOP_1
    return FILTERED if filtered else PLAIN


def keep(values: torch.Tensor, params: torch.Tensor, mass: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Applies temperature and filters to sorted candidates.

    Args:
        values: ``[P, C]`` logits, descending.
        params: ``[P, 4]`` float64: temperature, top_k, top_p, min_p.
        mass: ``[P]`` float64: total weight of the tokens that top_k and min_p keep, relative to the best token's; NaN: all
            of them are among the candidates.

    Returns:
        weights ``[P, C]`` float64, 0 for tokens not kept; cutoffs ``[P]``: the smallest kept logit; suffices ``[P]`` bool: no
        token to keep can be missing among the candidates.
    """
    temperature, top_k, top_p, min_p = params.unsqueeze(-1).unbind(1)
    width = values.shape[1]
    weights = ((values - values[:, :1]).double() / temperature).exp_()
    kth = values.gather(1, (top_k.long() - 1).clamp_(max=width - 1))
    limited = (values >= kth) | (top_k > width)
    # Banned tokens have no weight, and neither have tokens whose weight underflows: neither is ever sampled.
    kept = limited & (weights >= min_p) & (values > -torch.inf)
    weights = weights * kept
    before = weights.cumsum(-1)
    total = torch.where(mass.isnan().unsqueeze(1), before[:, -1:], mass.unsqueeze(1))
    before = before - weights
    # Tokens of equal logit share the mass before them.
    first = torch.ones_like(kept)
    torch.ne(values[:, 1:], values[:, :-1], out=first[:, 1:])
    before = torch.where(first, before, 0.0).cummax(-1).values
    # The best token has no mass before it, so it is kept however small top_p is.
    kept &= (before < top_p * total) | (top_p >= 1.0)
    count = kept.sum(-1, keepdim=True)
    cutoffs = values.gather(1, (count - 1).clamp_(min=0)).squeeze(1)
    # If the mass is unknown, all tokens that top_k and min_p keep must be candidates, not only those that top_p keeps.
    short = torch.where(mass.isnan(), weights[:, -1] > 0, cutoffs <= values[:, -1]) & (values[:, -1] > -torch.inf)
    return weights * kept, cutoffs, ~short


def cutoff_of(logits: torch.Tensor, weights: torch.Tensor, params: list[float]) -> torch.Tensor:
    """The smallest logit of one row that the filters keep. Runs on the host.

    A histogram of the weights by their logarithm finds the bin in which the mass reaches top_p; only that bin is sorted.

    Args:
        logits: ``[vocab]``
        weights: ``[vocab]`` float32: 1 for the best token.
        params: temperature, top_k, top_p, min_p.
    """
    temperature, top_k, top_p, min_p = params
    limited = top_k < len(logits)
    if limited or min_p > 0.0:
        survives = (weights >= min_p) & (logits > -torch.inf)
        if limited:
            survives &= logits >= logits.kthvalue(len(logits) - int(top_k) + 1).values
        logits, weights = logits[survives], weights[survives]
    if top_p >= 1.0:
        return logits.min()
    mass = weights.double()
    bins = ((logits.max() - logits) * (_BINS_A_NEPER / temperature)).clamp_(max=_BINS - 1).long()
    masses = torch.bincount(bins, weights=mass, minlength=_BINS)
    before = masses.cumsum(0) - masses
    target = top_p * masses.sum()
    reached = int(((before < target) & (masses > 0)).nonzero()[-1])
    inside = bins == reached
    values, order = logits[inside].sort(descending=True)
    shares = mass[inside][order]
    ahead = before[reached] + shares.cumsum(0) - shares
    first = torch.ones_like(values, dtype=torch.bool)
    torch.ne(values[1:], values[:-1], out=first[1:])
    return values[first & (ahead < target)].min()


class _PartialSample:
    """The state of a step's rows while they are sampled, one kind of row after the other."""

    def __init__(self, logits: torch.Tensor, maxima: torch.Tensor, tokens: torch.Tensor, best: torch.Tensor) -> None:
        self.logits, self.maxima = logits, maxima
        self.tokens, self.best = tokens, best
        self.cutoffs = torch.full_like(best, -torch.inf)

    def put(self, picked: Indices, tokens: torch.Tensor) -> None:
        self.tokens.index_copy_(0, upload(picked, tokens.device), tokens)

    def limit(self, picked: Indices, cutoffs: torch.Tensor) -> None:
        self.cutoffs.index_copy_(0, upload(picked, cutoffs.device), cutoffs)

    def result(self) -> SampledTokens:
        return SampledTokens(self.tokens, self.best, self.cutoffs)


def _weights(sampled: _PartialSample, picked: Indices, params: torch.Tensor) -> torch.Tensor:
    """``[P, vocab]`` float32: ``exp((logit - best) / temperature)``."""
    best = take_rows(sampled.best, picked).unsqueeze(1)
    temperature = take_rows(params, picked)[:, :1].float()
    return (take_rows(sampled.logits, picked) - best).div_(temperature).exp_()
