"""Reference of ``headrace.kernels.sampling.triton_filter.cutoffs``, by sorting."""

from __future__ import annotations

import torch

UNIT = 2.0**40
"""Token masses are integers, in units of the best token's mass divided by this."""


def cutoffs(logits: torch.Tensor, temperatures: torch.Tensor, filters: torch.Tensor) -> torch.Tensor:
    """Smallest logit of each row that its filters keep, as ``headrace.sampling.topk_topp`` defines them.

    Args:
        logits: ``[N, vocab]`` float.
        temperatures: ``[N]`` float; 0: greedy.
        filters: ``[N, 4]`` float64: the requested temperature, top_k (vocab: no limit), top_p, min_p.

    Returns:
        ``[N]`` float32: the smallest logit kept. -inf for greedy rows, rows without filters and rows without a finite best
        logit; the best logit where a temperature is requested and 0 is used.
    """
    vocab = logits.shape[1]
    values = logits.float().sort(dim=-1, descending=True).values
    best = logits.float().amax(-1)
    requested, top_k, top_p, min_p = filters.unsqueeze(-1).unbind(1)
    weights = ((values - best.unsqueeze(1)) / temperatures.float().unsqueeze(1)).exp()
    kept = (weights.double() >= min_p) & (values > -torch.inf) & (_larger(torch.ones_like(values).double(), values) < top_k)
    masses = (weights.double() * UNIT).floor().masked_fill(~kept, 0.0)
    kept &= (_larger(masses, values) < top_p * masses.sum(-1, keepdim=True)) | (top_p >= 1.0) | (values == best.unsqueeze(1))
    cutoff = values.masked_fill(~kept, torch.inf).amin(-1)
    filtered = (top_k < vocab) | (top_p < 1.0) | (min_p > 0.0)
    sampled = (temperatures > 0) & best.isfinite()
    cutoff = torch.where(filtered.squeeze(1) & sampled, cutoff, -torch.inf)
    return torch.where((requested.squeeze(1) > 0) & (temperatures == 0), best, cutoff)


def _larger(amounts: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Sum of the amounts ``[N, vocab]`` whose value is larger; values are sorted in descending order."""
    before = amounts.cumsum(-1) - amounts
    first = torch.ones_like(values, dtype=torch.bool)
    torch.ne(values[:, 1:], values[:, :-1], out=first[:, 1:])
    return torch.where(first, before, 0.0).cummax(-1).values
