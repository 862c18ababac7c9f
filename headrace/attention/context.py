"""ForwardContext: what a model's layers need besides hidden states. Passed as an argument, never looked up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch

from headrace.attention.backend import AttentionBackend, LayerCache, StepMetadata


class TokenKinds(NamedTuple):
    """The tokens of a step by what they stand for: int64 indices into the packed batch, ascending."""

    text: torch.Tensor
    items: torch.Tensor
    """Markers around an item are among its tokens."""


@dataclasses.dataclass(frozen=True)
class ForwardContext:
    """One forward pass. ``caches[i]`` and ``backends[i]`` belong to layer i."""

    step: StepMetadata
    caches: Sequence[LayerCache]
    backends: Sequence[AttentionBackend]
    kinds: TokenKinds | None = None
    """Kinds of the tokens, for models with ``VisionSpec.own_experts``; None: all tokens are text."""
