"""TransformersModel: a model of transformers whose attention is headrace's.

transformers lets a model call any registered function in place of its attention. Ours finds the layer by the order of the
calls, which is that of the trace (``trace.py``), and calls the layer's ``ForeignLayer``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

from headrace.layers.linear import Linear
from headrace.model_spec import ForeignSpec
from headrace.models.fallback.contract import ForeignLayer
from headrace.models.fallback.foreign_model import ForeignModel
from headrace.models.fallback.layout import TRANSFORMERS, TRANSFORMERS_OUT
from headrace.models.fallback.transformers.head import SplitModel
from headrace.models.fallback.transformers.rotary import Angles
from headrace.models.fallback.transformers.states import StateCalls
from headrace.models.fallback.transformers.trace import HANDLER, Trace, handled_attention
from headrace.models.interface import ModelInputs
from headrace.weights.names import NameTable
from headrace.weights.update import TensorFacts, WeightUpdate

ATTENTION = "headrace"
"""Name of the attention implementation. No mask function has this name, so transformers makes no masks."""

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]], torch.Tensor]
"""(layer, q, k, v in transformers' layout, further arguments) -> ``[1, T, heads, width]``."""


class Calls:
    """Maps the attention calls of one model, in order, to layers."""

    def __init__(self, modules: Sequence[nn.Module], layers: Sequence[ForeignLayer], states: StateCalls) -> None:
        self.modules = list(modules)
        """The attention module of each layer; layers may share one."""
        self.states = states
        self._layers = list(layers)
        self._next = 0
        self.substitute: Attend | None = None
        """Replaces paged attention while the model is verified or probed."""
        for module in self.modules:
            module.__dict__[HANDLER] = self

    @contextmanager
    def in_order(self) -> Iterator[None]:
        """One forward pass. Raises ValueError if not every layer attended."""
        self._next = 0
        with self.states.in_order():
            yield
        if self._next != len(self._layers):
            raise ValueError(f"{self._next} of {len(self._layers)} layers called attention in this step")

    @contextmanager
    def through(self, attend: Attend) -> Iterator[None]:
        """Replaces paged attention by ``attend`` inside the block."""
        before, self.substitute = self.substitute, attend
        try:
            yield
        finally:
            self.substitute = before

    @contextmanager
    def at(self, index: int) -> Iterator[None]:
        """Starts at layer ``index``, to run one layer alone."""
        self._next = index
        yield

    def turn(self, module: nn.Module) -> int:
        """Returns the layer of ``module`` in this call. Raises ValueError if the call is out of order."""
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
        """Computes one call of ``module``, with the arguments of transformers' attention functions.

        Raises:
            ValueError: the call is out of order, or its arguments differ from the trace.
        """
        index = self.turn(module)
        if mask is not None:
            raise ValueError(f"layer {index}: the model made an attention mask of its own")
        scale = arguments.get("scaling")
        if scale is not None and scale != self._layers[index].spec.scale:
            raise ValueError(
                f"layer {index}: scaling is {scale} in this call, but the layer's is {self._layers[index].spec.scale}"
            )
        if self.substitute is not None:
            return self.substitute(index, q, k, v, arguments)
        return self._layers[index](q, k, v, arguments.get("s_aux"))


class PackedMatrix(nn.Module):
    """A matrix that is held in another number format than floats, in place of the weights of the modules that have parts of it.

    Args:
        rows: path of each module, in order -> its outputs.
    """

    def __init__(self, layer: Linear, rows: Mapping[str, int]) -> None:
        super().__init__()
        self.layer = layer
        self.rows = dict(rows)

    def named(self, leaf: str) -> dict[str, int]:
        """The names of the modules' tensors -> rows."""
        return {f"{path}.{leaf}": rows for path, rows in self.rows.items()}


class TransformersModel(ForeignModel):
    """A model that transformers built.

    Args:
        foreign: with its weights, and the attention implementation ``ATTENTION``.
        traced: the trace of the same model.
    """

    def __init__(self, spec: ForeignSpec, foreign: PreTrainedModel, traced: Trace) -> None:
        super().__init__(spec, foreign.dtype)
        self.foreign = foreign
        self.angles = Angles()
        layers = [ForeignLayer(call.spec, self.cell, TRANSFORMERS, TRANSFORMERS_OUT) for call in traced.calls]
        states = StateCalls([foreign.get_submodule(call.path) for call in traced.state_calls], traced.state_calls, self.cell)
        self.calls = Calls([foreign.get_submodule(call.path) for call in traced.calls], layers, states)
        self.body = SplitModel(foreign, traced.body, traced.given)
        self.packed = nn.ModuleList()
        """``PackedMatrix`` of each matrix that is no longer floats."""

    def name_table(self) -> NameTable:
        table = super().name_table()
        for index, one in enumerate(self._packed()):
            table.fuse(f"packed.{index}.layer.weight", one.named("weight"))
            if one.layer.bias is not None:
                table.fuse(f"packed.{index}.layer.bias", one.named("bias"))
        return table

    def update_plan(self, facts: list[TensorFacts]) -> WeightUpdate:
        packed = self._packed()
        biases = {f"packed.{i}.layer.bias": one.layer.bias for i, one in enumerate(packed) if one.layer.bias is not None}
        layers = {f"packed.{i}.layer.weight": one.layer for i, one in enumerate(packed)}
        return WeightUpdate(self.name_table(), {**self.tensors_to_update(), **biases}, facts, layers)

    def _packed(self) -> list[PackedMatrix]:
        return cast(list[PackedMatrix], list(self.packed))

    def _run_layers(self, inputs: ModelInputs) -> torch.Tensor:
        self.angles.forget()
        ids, positions = inputs.input_ids[None], inputs.positions[None]
        with self.calls.in_order():
            if inputs.inputs_embeds is not None:
                return self.body.hidden(None, positions, inputs.embedded(self.body.embed)[None])[0]
            return self.body.hidden(ids, positions)[0]

    def _run_head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.body.logits(hidden[None])[0]


AttentionInterface.register(ATTENTION, handled_attention)
