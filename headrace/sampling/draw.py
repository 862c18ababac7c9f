"""Draw: temperature, min_p, top_k and top_p, then one random number a row.

What a filter keeps is defined without reference to an order, so that equal logits share their fate:

* top_k keeps a token if fewer than k tokens have a larger logit;
* min_p keeps a token if its probability is at least ``min_p`` times the best one's;
* top_p keeps, of what the other two kept, a token if those with a larger logit have less than ``top_p`` of their mass.

The number then falls on the tokens kept, in the order of their ids, each as wide as its probability: whichever way the
kept ones were found, the same one is drawn.

Where Triton kernels run, they find the smallest logit kept and draw among what is left (``headrace.kernels.triton.draw``).
Elsewhere: each filter keeps whole logit values from the top down, so candidates from a bounded set suffice as soon as a value
is dropped within it. A row whose candidates do not suffice is drawn again from all its tokens: that is a check on the host. On
a device where the host would have to wait for it, rows whose limit is not known beforehand sort the whole vocabulary at once,
and of the equals of the k-th logit those beyond the candidates are dropped.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from headrace.core.plan import NewSequence
from headrace.kernels import gpu
from headrace.kernels.transfer import upload
from headrace.sampling.feature import Indices, Rows, take_rows
from headrace.sampling.random import seed_words, uniform
from headrace.sampling.vocabulary import argmax, block_maxima, block_sums, candidates, pick, pick_wide
from headrace.sampling_params import SamplingParams

_FEWEST = 64
"""Candidates of a row whose top_k asks for no more."""
_SPARE = 8
"""Candidates beyond top_k, so that a few equals of the last one fit in."""
_MOST = 1024
"""Beyond this many candidates, working from all tokens is faster than finding the best ones."""
_BINS = 2048
_BINS_A_NEPER = 64
"""Of the histogram in which a floor is searched."""

GREEDY, TOP_1, PLAIN, FILTERED = 0, 1, 2, 3


class Drawn(NamedTuple):
    """Per row, ``[N]``."""

    tokens: torch.Tensor
    """int64; any token where ``best`` is not finite."""
    best: torch.Tensor
    """The row's largest logit, float32: NaN if there is a NaN, -inf if every token is banned."""
    floors: torch.Tensor
    """The smallest logit that the filters kept, float32; -inf where nothing was filtered."""


class Draw:
    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        # Index space: slot.
        self._kind = np.zeros(num_slots, dtype=np.int8)
        self._width = np.zeros(num_slots, dtype=np.int64)
        """Candidates that the first attempt takes."""
        self._by_mass = np.zeros(num_slots, dtype=np.bool_)
        """Filters by top_p alone, which takes the mass of the whole vocabulary."""
        self.params = torch.zeros(num_slots, 4, dtype=torch.float64, device=device)
        """temperature as it was asked for, top_k (vocab_size: no limit), top_p, min_p."""
        self.temperatures = torch.zeros(num_slots, dtype=torch.float32, device=device)
        """0 where the best token is taken, whatever the temperature."""
        self.keys = torch.zeros(num_slots, 3, dtype=torch.int64, device=device)
        """Low and high word of the seed, and the sample's index."""

    def add(self, slot: int, seq: NewSequence) -> None:
        p = seq.sampling
        limited = 0 < p.top_k < self._vocab_size
        top_k = p.top_k if limited else self._vocab_size
        # Below this no float32 logits could differ by so little that the temperature would tell.
        temperature = max(p.temperature, 1e-30) if p.temperature else 0.0
        filtered = limited or p.top_p < 1.0 or p.min_p > 0.0
        self._kind[slot] = _kind_of(p, filtered)
        self._width[slot] = self._first_width(top_k)
        self._by_mass[slot] = not limited and p.top_p < 1.0 and p.min_p == 0.0
        row = np.array([temperature, top_k, p.top_p, p.min_p])
        self.params[slot].copy_(upload(row, self._device), non_blocking=True)
        best = self._kind[slot] in (GREEDY, TOP_1)
        self.temperatures[slot : slot + 1].fill_(0.0 if best else temperature)
        key = np.array([*seed_words(seq.seed), seq.sample_index])
        self.keys[slot].copy_(upload(key, self._device), non_blocking=True)

    def filters(self, slots: Indices) -> bool:
        """True if any slot's sequence draws from what filters keep; the best token alone is no filter's matter."""
        return bool((self._kind[slots] == FILTERED).any())

    def _first_width(self, top_k: int) -> int:
        width = _FEWEST
        while width < top_k + _SPARE:
            width *= 2
        return width if width <= _MOST or self._device.type != "cpu" else _FEWEST

    def draw(self, logits: torch.Tensor, rows: Rows, maxima: torch.Tensor | None = None) -> Drawn:
        """``logits [N, vocab]`` float32 are left as they are; ``maxima`` are their ``block_maxima`` if known already."""
        if gpu.takes(logits):
            return self._draw_by_kernels(logits, rows)
        maxima = block_maxima(logits) if maxima is None else maxima
        drawn = _Draft(logits, maxima, *argmax(logits, maxima))
        kinds = self._kind[rows.slots]
        if not kinds.any():
            return drawn.result()
        if len(picked := np.flatnonzero(kinds == TOP_1)):
            drawn.limit(picked, take_rows(drawn.best, picked))
        params = self.params[rows.slots_device]
        numbers = uniform(self.keys[rows.slots_device], rows.positions)
        if len(picked := np.flatnonzero(kinds == PLAIN)):
            drawn.put(picked, pick_wide(_weights(drawn, picked, params), take_rows(numbers, picked)))
        widths = np.where(kinds == FILTERED, self._width[rows.slots], 0)
        if widths.any():
            mass = self._mass(drawn, np.flatnonzero((kinds == FILTERED) & self._by_mass[rows.slots]), params)
            for width in sorted({*widths.tolist()} - {0}):
                self._filtered(drawn, np.flatnonzero(widths == width), (params, mass, numbers), width)
        return drawn.result()

    def _draw_by_kernels(self, logits: torch.Tensor, rows: Rows) -> Drawn:
        """All rows at once; nothing waits for the device."""
        kinds = self._kind[rows.slots]
        filters = self.params if bool(((kinds == TOP_1) | (kinds == FILTERED)).any()) else None
        state = (self.temperatures, self.keys, rows.positions, rows.slots_device, filters) if kinds.any() else ()
        drawn = gpu.kernels("draw").draw(logits, *state)
        floors = torch.full_like(drawn.best, -torch.inf) if drawn.floors is None else drawn.floors
        return Drawn(drawn.tokens, drawn.best, floors)

    def _mass(self, drawn: _Draft, picked: Indices, params: torch.Tensor) -> torch.Tensor:
        """``[N]`` float64: the weight of the whole vocabulary for ``picked`` rows, NaN for others."""
        mass = torch.full((len(params),), torch.nan, dtype=torch.float64, device=self._device)
        if len(picked):
            mass.index_copy_(0, upload(picked, self._device), block_sums(_weights(drawn, picked, params)).sum(-1))
        return mass

    def _filtered(self, drawn: _Draft, picked: Indices, known: tuple[torch.Tensor, ...], width: int) -> None:
        """Draws for rows that take ``width`` candidates, and from all their tokens where those turn out not to suffice.

        ``known``: params ``[N, 4]``, mass ``[N]`` and numbers ``[N]`` of all rows.
        """
        logits, maxima = take_rows(drawn.logits, picked), take_rows(drawn.maxima, picked)
        params, mass, numbers = (take_rows(tensor, picked) for tensor in known)
        values, tokens = candidates(logits, maxima, min(width, self._vocab_size))
        weights, floors, suffices = keep(values, params, mass)
        tokens, order = tokens.sort(dim=-1)
        drawn.put(picked, tokens.gather(1, pick(weights.gather(1, order), numbers).unsqueeze(1)).squeeze(1))
        drawn.limit(picked, floors)
        if width < self._vocab_size and self._device.type == "cpu":
            for place in np.flatnonzero(~suffices.numpy()).tolist():
                self._from_all(drawn, picked[place : place + 1], known[0], known[2])

    def _from_all(self, drawn: _Draft, picked: Indices, params: torch.Tensor, numbers: torch.Tensor) -> None:
        """Draws for one row whose filters keep more than a few tokens."""
        row = int(picked[0])
        weights = _weights(drawn, picked, params)
        floor = floor_of(drawn.logits[row], weights[0], params[row].tolist())
        weights.masked_fill_(drawn.logits[row] < floor, 0.0)
        drawn.put(picked, pick_wide(weights, numbers[row : row + 1]))
        drawn.limit(picked, floor.unsqueeze(0))


def _kind_of(params: SamplingParams, filtered: bool) -> int:
    if params.temperature == 0.0:
        return GREEDY
    if params.greedy:
        return TOP_1
    return FILTERED if filtered else PLAIN


def keep(values: torch.Tensor, params: torch.Tensor, mass: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Applies temperature and filters to sorted candidates.

    Args:
        values: ``[P, C]`` logits, falling.
        params: ``[P, 4]`` float64: temperature, top_k, top_p, min_p.
        mass: ``[P]`` float64: the weight of everything that top_k and min_p keep, where the best token weighs 1; NaN:
            it is all among the candidates.

    Returns:
        weights ``[P, C]`` float64, 0 for what is not kept; floors ``[P]``: the smallest logit kept; suffices ``[P]``
        bool: nothing that would be kept can be missing among the candidates.
    """
    temperature, top_k, top_p, min_p = params.unsqueeze(-1).unbind(1)
    width = values.shape[1]
    weights = ((values - values[:, :1]).double() / temperature).exp_()
    kth = values.gather(1, (top_k.long() - 1).clamp_(max=width - 1))
    limited = (values >= kth) | (top_k > width)
    # A banned token has no weight, but a weight may also be too small for its number: both are never drawn.
    kept = limited & (weights >= min_p) & (values > -torch.inf)
    weights = weights * kept
    before = weights.cumsum(-1)
    total = torch.where(mass.isnan().unsqueeze(1), before[:, -1:], mass.unsqueeze(1))
    before = before - weights
    # What stands before a token's equals stands before the token.
    first = torch.ones_like(kept)
    torch.ne(values[:, 1:], values[:, :-1], out=first[:, 1:])
    before = torch.where(first, before, 0.0).cummax(-1).values
    # The best token has nothing before it, and so stays, however small top_p is.
    kept &= (before < top_p * total) | (top_p >= 1.0)
    count = kept.sum(-1, keepdim=True)
    floors = values.gather(1, (count - 1).clamp_(min=0)).squeeze(1)
    # Without the mass known, all that top_k and min_p keep must be there, not only what top_p leaves of it.
    short = torch.where(mass.isnan(), weights[:, -1] > 0, floors <= values[:, -1]) & (values[:, -1] > -torch.inf)
    return weights * kept, floors, ~short


def floor_of(logits: torch.Tensor, weights: torch.Tensor, params: list[float]) -> torch.Tensor:
    """The smallest logit of one row that the filters keep.

    A histogram of the weights over their logarithm tells in which bin the mass of top_p is reached; only what is in that
    bin is sorted. On the host.

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


class _Draft:
    """The rows' tokens while they are being drawn."""

    def __init__(self, logits: torch.Tensor, maxima: torch.Tensor, tokens: torch.Tensor, best: torch.Tensor) -> None:
        self.logits, self.maxima = logits, maxima
        self.tokens, self.best = tokens, best

        self.floors = torch.full_like(best, -torch.inf)

    def put(self, picked: Indices, tokens: torch.Tensor) -> None:
        self.tokens.index_copy_(0, upload(picked, tokens.device), tokens)

    def limit(self, picked: Indices, floors: torch.Tensor) -> None:
        self.floors.index_copy_(0, upload(picked, floors.device), floors)

    def result(self) -> Drawn:
        return Drawn(self.tokens, self.best, self.floors)


def _weights(drawn: _Draft, picked: Indices, params: torch.Tensor) -> torch.Tensor:
    """``[P, vocab]`` float32: of each token, e to the (logit - best) / temperature."""
    best = take_rows(drawn.best, picked).unsqueeze(1)
    temperature = take_rows(params, picked)[:, :1].float()
    return (take_rows(drawn.logits, picked) - best).div_(temperature).exp_()
