"""Model: what the runner asks of a model."""

from __future__ import annotations

from typing import Protocol

import torch

from headrace.attention.context import ForwardContext
from headrace.spec import ModelFacts


class Model(Protocol):
    """Gives hidden states of a step's tokens, and logits of hidden states."""

    @property
    def spec(self) -> ModelFacts: ...

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...
