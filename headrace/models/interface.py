"""The interface between the engine and any model, native or foreign, and the inputs of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from headrace.attention.context import ForwardContext, WantedTokens
from headrace.model_spec import ModelFacts
from headrace.parallel.group import Group


@dataclasses.dataclass(frozen=True, slots=True)
class ModelInputs:
    """The T tokens of one step, packed row after row. Optional inputs cost nothing when None."""

    input_ids: torch.Tensor
    """``[T]`` int64."""
    positions: torch.Tensor
    """``[T]`` int64: of each token in its sequence."""
    rope_positions: torch.Tensor | None = None
    """``[T]`` or ``[sections, T]`` int64 below ``max_position``, for rotary embeddings; None: ``positions``."""
    inputs_embeds: torch.Tensor | None = None
    """``[T, hidden]`` in the model's dtype: replaces the (scaled) input of the first layer."""
    embeds_mask: torch.Tensor | None = None
    """``[T]`` bool: the tokens that ``inputs_embeds`` replaces; None: all."""
    extras: Mapping[int, torch.Tensor] | None = None
    """Layer -> ``[T, hidden]``, added to the residual stream after that layer."""
    adapters: bool = False
    """Tokens have adapters, which the model's matrices know."""

    def embedded(self, embed: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Returns the first layer's input ``[T, hidden]``, a new tensor. ``embed`` computes it from ids ``[T]``."""
        if self.inputs_embeds is None:
            return embed(self.input_ids)
        if self.embeds_mask is None:
            return self.inputs_embeds.clone(memory_format=torch.contiguous_format)
        return torch.where(self.embeds_mask[:, None], self.inputs_embeds, embed(self.input_ids))


@dataclasses.dataclass(slots=True)
class HiddenStates:
    """Hidden states of a step's tokens between two layers: the residual stream is ``x + residual``."""

    x: torch.Tensor
    """``[T, hidden]``: the last layer's addition to the stream."""
    residual: torch.Tensor | None = None
    """``[T, hidden]``: the stream before that; None: ``x`` is all of it, as before the first layer."""

    @property
    def nbytes(self) -> int:
        return self.x.nbytes + (0 if self.residual is None else self.residual.nbytes)


class LayersCall(Protocol):
    """Runs all layers of a decoder in one call, with the same result."""

    def takes(self, ctx: ForwardContext) -> bool:
        """Returns whether the call supports the step, its caches and its backends."""
        ...

    def __call__(
        self, stream: torch.Tensor, angles: Sequence[torch.Tensor | None], ctx: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All layers of one step, whose context it ``takes``.

        Args:
            stream: ``[T, hidden]``, the input of the first layer; it is overwritten.
            angles: of each layer, ``[T, rotary_dim]``: contiguous cosines and sines.

        Returns:
            ``[T, hidden]`` twice: what the last layer adds to the residual stream, and the stream before it.
        """
        ...


class Model(Protocol):
    """Computes the hidden states of a step's tokens, and logits of hidden states."""

    @property
    def spec(self) -> ModelFacts: ...

    @property
    def group(self) -> Group:
        """The tensor-parallel ranks that hold the model together."""
        ...

    def __call__(self, inputs: ModelInputs, ctx: ForwardContext) -> torch.Tensor:
        """``[T, hidden]``, as ``logits`` takes them.

        Raises:
            ValueError: the model cannot take one of the optional inputs; names it.
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[N, hidden] -> [N, vocab]`` float32."""
        ...


@runtime_checkable
class ScoringModel(Model, Protocol):
    """A model whose hidden states can be scored without the logits of its whole vocabulary."""

    def token_logits(self, hidden: torch.Tensor, token_ids: Sequence[int]) -> torch.Tensor:
        """``[N, hidden] -> [N, len(token_ids)]`` float32: these columns of ``logits``."""
        ...

    def classes(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[N, hidden] -> [N, classes]`` float32: logits of the classification head. Raises EngineError if there is none."""
        ...


@runtime_checkable
class SelectiveModel(Model, Protocol):
    """A model that can leave out what its last layer computes of tokens whose results nothing reads."""

    def selects(self, inputs: ModelInputs, ctx: ForwardContext) -> bool:
        """Returns whether ``forward_wanted`` can compute the step."""
        ...

    def forward_wanted(self, inputs: ModelInputs, ctx: ForwardContext, wanted: WantedTokens) -> torch.Tensor:
        """``[N, hidden]``: the call's result for the wanted tokens, to rounding."""
        ...


@runtime_checkable
class LayeredModel(Model, Protocol):
    """A model that can pause between two layers of a forward pass. All calls of one pass together compute what ``Model``'s
    call does, bit for bit."""

    def first_states(self, inputs: ModelInputs) -> HiddenStates:
        """Returns the states before the first layer."""
        ...

    def run_layers(self, states: HiddenStates, inputs: ModelInputs, ctx: ForwardContext, layers: range) -> None:
        """Replaces the states before the first of ``layers`` by those after the last one."""
        ...

    def last_states(self, states: HiddenStates) -> torch.Tensor:
        """Returns ``[T, hidden]`` after the last layer, as ``logits`` takes them."""
        ...
