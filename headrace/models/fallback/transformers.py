"""TransformersModel: a model of transformers whose attention is headrace's.

transformers lets a model call any registered function in place of its attention. Ours finds the layer by the order of the
calls, which is the order that was observed when the model was looked at (``observe.py``), and hands over to the contract.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from headrace.attention.context import ForwardContext
from headrace.models.fallback import weights
from headrace.models.fallback.contract import ContextCell, ForeignLayer, check_layers, finished_logits
from headrace.models.fallback.head import Body
from headrace.models.fallback.layout import TRANSFORMERS, TRANSFORMERS_OUT
from headrace.models.fallback.observe import Observation
from headrace.models.fallback.rotary import Angles
from headrace.spec import ForeignSpec
from headrace.weights.names import NameTable
from headrace.weights.update import Named, WeightUpdate

ATTENTION = "headrace"
"""Of the attention implementation. No masks are registered under this name, so transformers makes none."""
CALLS = "_headrace_calls"
"""Attribute of the modules that attend: the calls of the model that they belong to."""

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]], torch.Tensor]
"""(layer, q, k, v as transformers gives them, further arguments) -> ``[1, T, heads, width]``."""


class Calls:
    """The attention calls of one model: which module makes the next, and which layer it is."""

    def __init__(self, modules: Sequence[nn.Module], layers: Sequence[ForeignLayer]) -> None:
        self.modules = list(modules)
        """Of each layer, the module that attends; one may be several layers."""
        self._layers = list(layers)
        self._next = 0
        self._attend: Attend = self._paged
        for module in self.modules:
            module.__dict__[CALLS] = self

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """One forward pass. Raises ValueError if not every layer attended."""
        self._next = 0
        yield
        if self._next != len(self._layers):
            raise ValueError(f"{self._next} of {len(self._layers)} layers called attention in this step")

    @contextmanager
    def through(self, attend: Attend) -> Iterator[None]:
        """Something else in place of paged attention, for a look at the model."""
        before, self._attend = self._attend, attend
        try:
            yield
        finally:
            self._attend = before

    @contextmanager
    def at(self, index: int) -> Iterator[None]:
        """The next call is layer ``index``'s: for a look at one layer alone."""
        self._next = index
        yield

    def turn(self, module: nn.Module) -> int:
        """The layer that ``module`` is in this call. Raises ValueError if it is not the one whose turn it is."""
        index = self._next
        if index >= len(self._layers) or self.modules[index] is not module:
            raise ValueError(f"call {index} of attention comes from a {type(module).__name__} whose turn it is not")
        self._next += 1
        return index

    def attend(
        self,
        module: nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        arguments: dict[str, Any],
    ) -> torch.Tensor:
        """One call of ``module``, with what transformers hands to attention functions.

        Raises:
            ValueError: it is not the module whose turn it is, or it asks for something other than was observed.
        """
        index = self.turn(module)
        if mask is not None:
            raise ValueError(f"layer {index}: the model made an attention mask of its own")
        scale = arguments.get("scaling")
        if scale is not None and scale != self._layers[index].spec.scale:
            raise ValueError(
                f"layer {index}: scaling is {scale} in this call, but the layer's is {self._layers[index].spec.scale}"
            )
        return self._attend(index, q, k, v, arguments)

    def _paged(self, index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        return self._layers[index](q, k, v, arguments.get("s_aux"))


class TransformersModel(nn.Module):
    """What the runner needs of a model, of one that transformers built.

    Args:
        foreign: with its weights, and the attention implementation ``ATTENTION``.
        seen: the same model as it was observed.
    """

    def __init__(self, spec: ForeignSpec, foreign: PreTrainedModel, seen: Observation) -> None:
        super().__init__()
        self.spec = spec
        self.foreign = foreign
        self.dtype = foreign.dtype
        self.cell = ContextCell()
        self.angles = Angles()
        layers = [ForeignLayer(layer, self.cell, TRANSFORMERS, TRANSFORMERS_OUT) for layer in spec.layers]
        self.calls = Calls([foreign.get_submodule(call.path) for call in seen.calls], layers)
        self.body = Body(foreign, seen.body, seen.given)
        self._checked = False

    @torch.inference_mode()
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """One step.

        Args:
            input_ids: ``[T]`` int64.
            positions: ``[T]`` int64, absolute.

        Returns:
            ``[T, hidden]``, as the head takes it.

        Raises:
            ValueError: the caches are not the layers', or the model did not attend as it was observed to.
        """
        if not self._checked:
            check_layers(self.spec.layers, len(ctx.caches))
            self._checked = True
        if not len(input_ids):
            return torch.empty(0, self.spec.hidden_size, dtype=self.dtype, device=input_ids.device)
        self.angles.forget()
        with self.cell.holding(ctx), self.calls.in_order():
            return self.body.hidden(input_ids[None], positions[None])[0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[N, hidden] -> [N, columns]`` float32, -inf in columns that are padding."""
        if not len(hidden):
            return torch.empty(0, self.spec.vocab_size, dtype=torch.float32, device=hidden.device)
        return finished_logits(self.body.logits(hidden[None])[0], self.spec.num_tokens)

    def name_table(self) -> NameTable:
        """The library's names of the weights."""
        return weights.name_table(self.foreign)

    def weight_update(self, tensors: Named) -> WeightUpdate:
        """New values under the library's names, as ``weights.weight_update``; fused matrices are views of one, and follow."""
        return weights.weight_update(self.foreign, tensors)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    calls: Calls | None = module.__dict__.get(CALLS)
    if calls is None:
        raise ValueError(f"attention implementation {ATTENTION!r} works in models that headrace has loaded, and in no others")
    return calls.attend(module, query, key, value, attention_mask, arguments), None


AttentionInterface.register(ATTENTION, _attend)
