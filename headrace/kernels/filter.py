"""The smallest logit that a row's filters keep: what ``headrace.kernels.triton.filter`` finds, by sorting."""

from __future__ import annotations

import torch

UNIT = 2.0**40
"""Masses are whole numbers of this part of the best token's."""


def floors(logits: torch.Tensor, temperatures: torch.Tensor, filters: torch.Tensor) -> torch.Tensor:
    """What the filters keep of each row, as ``headrace.sampling.draw`` defines it, is what is not below.

    Args:
        logits: ``[N, vocab]`` float.
        temperatures: ``[N]`` float; 0: nothing is drawn.
        filters: ``[N, 4]`` float64: temperature as it was asked for, top_k (vocab: no limit), top_p, min_p.

    Returns:
        ``[N]`` float32: the smallest logit kept; -inf for rows that no filter or no number is asked of, and for rows
        without a finite best logit; the best logit where a temperature is asked for and not used.
    """
    vocab = logits.shape[1]
    values = logits.float().sort(dim=-1, descending=True).values
    best = logits.float().amax(-1)
    asked, top_k, top_p, min_p = filters.unsqueeze(-1).unbind(1)
    weights = ((values - best.unsqueeze(1)) / temperatures.float().unsqueeze(1)).exp()
    kept = (weights.double() >= min_p) & (values > -torch.inf) & (_larger(torch.ones_like(values).double(), values) < top_k)
    masses = (weights.double() * UNIT).floor().masked_fill(~kept, 0.0)
    kept &= (_larger(masses, values) < top_p * masses.sum(-1, keepdim=True)) | (top_p >= 1.0) | (values == best.unsqueeze(1))
    found = values.masked_fill(~kept, torch.inf).amin(-1)
    filtered = (top_k < vocab) | (top_p < 1.0) | (min_p > 0.0)
    drawn = (temperatures > 0) & best.isfinite()
    found = torch.where(filtered.squeeze(1) & drawn, found, -torch.inf)
    return torch.where((asked.squeeze(1) > 0) & (temperatures == 0), best, found)


def _larger(amounts: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Of amounts ``[N, vocab]`` in falling order of values: the sum of those whose value is larger."""
    before = amounts.cumsum(-1) - amounts
    first = torch.ones_like(values, dtype=torch.bool)
    torch.ne(values[:, 1:], values[:, :-1], out=first[:, 1:])
    return torch.where(first, before, 0.0).cummax(-1).values
