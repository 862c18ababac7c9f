"""Token embedding."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import embedding

from headrace.parallel.group import ALONE, Group


class Embedding(nn.Module):
    """Looks up a row of ``weight`` for each token.

    Args:
        start: the token of the first row, where tensor-parallel ranks hold some rows each; None: all rows are here.
    """

    group: Group = ALONE

    def __init__(
        self, vocab_size: int, width: int, *, start: int | None = None, dtype: torch.dtype, device: str | torch.device
    ) -> None:
        super().__init__()
        self.start = start
        self.weight = nn.Parameter(torch.empty(vocab_size, width, dtype=dtype, device=device), requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``[T]`` int64 ``-> [T, width]``"""
        if self.start is None:
            return embedding(token_ids, self.weight)
        rows = token_ids - self.start
        held = (rows >= 0) & (rows < len(self.weight))
        own = embedding(rows.where(held, 0), self.weight)
        return self.group.all_reduce(own.where(held.unsqueeze(-1), 0))

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]} x {self.weight.shape[1]}"
