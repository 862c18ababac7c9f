"""Token embedding."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import embedding


class Embedding(nn.Module):
    """Looks up a row of ``weight`` for each token."""

    def __init__(self, vocab_size: int, width: int, *, dtype: torch.dtype, device: str | torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, width, dtype=dtype, device=device), requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """``[T]`` int64 ``-> [T, width]``"""
        return embedding(token_ids, self.weight)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]} x {self.weight.shape[1]}"
