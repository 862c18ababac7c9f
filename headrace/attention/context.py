"""ForwardContext: what a model's layers need besides hidden states. Passed as an argument, never looked up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch

from headrace.attention.backend import AttentionBackend, LayerCache, StepMetadata
from headrace.cache.states import LayerState
from headrace.kernels.state.metadata import StateMetadata


class TokenKinds(NamedTuple):
    """The tokens of a step by what they stand for: int64 indices into the packed batch, ascending."""

    text: torch.Tensor
    items: torch.Tensor
    """Markers around an item are among its tokens."""


@dataclasses.dataclass(frozen=True)
class StepStates:
    """The state layers' part of a forward pass. ``layers[i]`` belongs to state layer i."""

    rows: StateMetadata
    layers: Sequence[LayerState]


@dataclasses.dataclass(frozen=True)
class ForwardContext:
    """One forward pass. ``caches[i]`` and ``backends[i]`` belong to attention layer i."""

    step: StepMetadata
    caches: Sequence[LayerCache]
    backends: Sequence[AttentionBackend]
    kinds: TokenKinds | None = None
    """Kinds of the tokens, for models with ``VisionSpec.own_experts``; None: all tokens are text."""
    states: StepStates | None = None
    """None: the model has no state layers."""
    chosen: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Layer -> what its indexer chose in this pass, as ``kernels.indexer.choose`` returns it, for layers behind it too."""

    def state_of(self, index: int) -> tuple[StateMetadata, LayerState]:
        """Returns the step's rows and the states of state layer ``index``.

        Raises:
            ValueError: the pass has no states.
        """
        if self.states is None:
            raise ValueError(f"state layer {index} runs in a forward pass without states")
        return self.states.rows, self.states.layers[index]
