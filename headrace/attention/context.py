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


class WantedTokens(NamedTuple):
    """The tokens of a step whose hidden states behind the last layer are read: some at the end of each row."""

    tokens: torch.Tensor
    """``[N]`` int64: indices into the packed batch, ascending."""
    rows: torch.Tensor
    """``[N]`` int64: the row of each."""
    step: StepMetadata
    """The step's rows with these tokens alone."""

    def of_stream(self, stream: torch.Tensor, query_start: torch.Tensor) -> torch.Tensor:
        """``[T, hidden] -> [N, hidden]``: NaN for all tokens of a row that has one which is not finite, whose KV must not be
        used. ``query_start``: of all tokens."""
        broken = ~stream.sum(-1, dtype=torch.float32).isfinite()
        until = torch.nn.functional.pad(broken.cumsum(0), (1, 0))[query_start.long()]
        return stream[self.tokens].masked_fill_((until.diff() > 0)[self.rows].unsqueeze(1), torch.nan)


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
    wanted: WantedTokens | None = None
    """The tokens whose results a last layer gives; None: all, as in every other layer."""

    def wanted_of(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what a layer goes on with of ``[T, ...]``."""
        return x if self.wanted is None else x[self.wanted.tokens]

    def state_of(self, index: int) -> tuple[StateMetadata, LayerState]:
        """Returns the step's rows and the states of state layer ``index``.

        Raises:
            ValueError: the pass has no states.
        """
        if self.states is None:
            raise ValueError(f"state layer {index} runs in a forward pass without states")
        return self.states.rows, self.states.layers[index]
