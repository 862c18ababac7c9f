"""Causal masks for queries at the end of a longer row of keys."""

from __future__ import annotations

import torch

_ENTRIES = 1 << 21
_QUERIES = (16, 256)


class Staircases:
    """Additive masks, kept between steps.

    In a causal mask whose last query sees the last key, each query sees one key more than the one before: every such mask
    is a view of one wide staircase, so only a few are ever allocated.
    """

    def __init__(self) -> None:
        self._by_shape: dict[object, torch.Tensor] = {}

    @staticmethod
    def num_queries(length: int) -> int:
        """How many queries with ``length`` keys to take at a time, so that a mask stays small."""
        fewest, most = _QUERIES
        return max(fewest, min(most, _ENTRIES // length))

    def mask(self, queries: int, length: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The last of ``queries`` consecutive queries sees the last of ``length`` keys, and ``window`` at most.

        Returns:
            ``[queries, length]``, 0 or -inf: a view.
        """
        steps = 1 << max(length - 1, 0).bit_length()
        key = (steps, window, dtype, device)
        wide = self._by_shape.get(key)
        if wide is None or len(wide) < queries:
            wide = self._by_shape[key] = _staircase(max(queries, self.num_queries(steps)), steps, window, dtype, device)
        # Row i of the staircase sees up to column steps + i; row i of the mask sees up to key length - queries + i.
        shift = steps - (length - queries)
        return wide[:queries, shift : shift + length]


def _staircase(queries: int, steps: int, window: int | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``[queries, steps + queries]``: row i sees columns up to ``steps + i``."""
    mask = torch.full((queries, steps + queries), -torch.inf, dtype=dtype, device=device).triu_(steps + 1)
    if window is not None:
        mask += torch.full_like(mask, -torch.inf).tril_(steps - window)
    return mask
