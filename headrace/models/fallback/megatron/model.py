"""Models of Megatron-core on headrace's attention.

The modules stay the trainer's. Only during a step, each layer's ``core_attention`` is replaced and every module is in eval
mode; afterwards, also on an exception, the model is restored. No weight is copied: the next step reads what an optimiser
writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from headrace.model_spec import AttentionSpec
from headrace.models.fallback.contract import ForeignLayer
from headrace.models.fallback.foreign_model import ForeignModel
from headrace.models.fallback.layout import MEGATRON
from headrace.models.fallback.megatron.describe import MegatronDescription, MegatronLayer
from headrace.models.fallback.megatron.rotary import StepRotary
from headrace.models.interface import ModelInputs

Replacement = tuple[Any, str, nn.Module]
"""(module, attribute, replacement of its submodule)"""


class CoreAttention(nn.Module):
    """Replaces a layer's ``core_attention``.

    Args:
        layer: our attention of it.
        turn: checks the order of calls.
        original: the replaced module; only its sinks are read.
    """

    def __init__(self, layer: ForeignLayer, turn: Turn, original: nn.Module) -> None:
        super().__init__()
        self._layer = layer
        self._turn = turn
        self._sinks = Sinks(layer.spec, original)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        attention_mask: torch.Tensor | None = None,
        **arguments: Any,
    ) -> torch.Tensor:
        """``[T, 1, heads, d]`` each -> ``[T, 1, heads * dv]``.

        Raises:
            ValueError: it is not this layer's turn, or an argument asks for what our attention does not do.
        """
        index = self._layer.spec.layer
        self._turn.take(index)
        arguments.pop("attn_mask_type", None)
        unsupported = sorted(name for name, given in arguments.items() if given is not None)
        if attention_mask is not None:
            unsupported.append("attention_mask")
        if unsupported:
            raise ValueError(f"layer {index}: {', '.join(unsupported)} cannot be given: tokens see those before them")
        return self._layer(query, key, value, self._sinks(query.device)).flatten(2)


class Sinks:
    """Reads the sinks of a layer from its ``core_attention``, in each step.

    Args:
        original: the layer's ``core_attention``. It stays the trainer's.
    """

    def __init__(self, spec: AttentionSpec, original: nn.Module) -> None:
        self._spec = spec
        self._original = original
        self._zeros: torch.Tensor | None = None

    def __call__(self, device: torch.device) -> torch.Tensor | None:
        """``[num_heads]`` logits; None: the layer has none."""
        if not self._spec.sinks:
            return None
        learned: torch.Tensor | None = getattr(self._original, "softmax_offset", None)
        if learned is not None:
            return learned
        # "off-by-one": one more term in the denominator, which is exp(0).
        if self._zeros is None:
            self._zeros = torch.zeros(self._spec.num_heads, dtype=torch.float32, device=device)
        return self._zeros


class Turn:
    """Checks that layers attend in their order, each once a step."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._next = 0

    @contextlib.contextmanager
    def all(self) -> Iterator[None]:
        """One step. Raises ValueError if not every layer attended."""
        self._next = 0
        yield
        if self._next != self._num_layers:
            raise ValueError(f"{self._next} of {self._num_layers} layers called core_attention in this step")

    def take(self, index: int) -> None:
        if index != self._next:
            raise ValueError(f"layer {index} called core_attention when it was the turn of layer {self._next}")
        self._next += 1


class MegatronModel(ForeignModel):
    """A Megatron-core ``GPTModel``.

    Args:
        described: the model and what it is. The model is not registered here as a part: it is its owner's.
    """

    def __init__(self, described: MegatronDescription) -> None:
        super().__init__(described.spec, getattr(torch, described.spec.dtype))
        self.__dict__.update(described=described, foreign=described.model)
        self._rotary = described.rotary
        self._turn = Turn(len(described.layers))
        self._layer_rotaries = {
            layer.rotary.key: StepRotary(layer.rotary) for layer in described.layers if layer.rotary is not None
        }
        """Rotary modules of layers that compute angles themselves; layers with equal angles share one."""
        self._replacements = [entry for layer in described.layers for entry in self._replacements_of(layer)]
        self._modules_of_foreign = list(described.model.modules())

    described: MegatronDescription

    def _run_layers(self, inputs: ModelInputs) -> torch.Tensor:
        positions = inputs.positions
        for stand_in in self._layer_rotaries.values():
            stand_in.angles = stand_in.rotary.angles(positions)
        with evaluating(self._modules_of_foreign), replaced(self._replacements), self._turn.all():
            # Like the model's own decoder_input, inputs_embeds stand for the whole embedding, learned positions included.
            embed = partial(self.foreign.embedding, position_ids=positions[None])
            hidden: torch.Tensor = inputs.embedded(lambda ids: embed(input_ids=ids[None])[:, 0])
            angles = None if self._rotary is None else self._rotary.angles(positions)
            hidden = self.foreign.decoder(hidden_states=hidden[:, None], attention_mask=None, rotary_pos_emb=angles)
        return hidden[:, 0]

    def _run_head(self, hidden: torch.Tensor) -> torch.Tensor:
        foreign = self.foreign
        shared = foreign.shared_embedding_or_output_weight() if foreign.share_embeddings_and_output_weights else None
        logits: torch.Tensor = foreign.output_layer(hidden[:, None], weight=shared, runtime_gather_output=True)[0]
        return logits[:, 0]

    def _replacements_of(self, layer: MegatronLayer) -> Iterator[Replacement]:
        attention = layer.attention
        ours = ForeignLayer(layer.spec, self.cell, MEGATRON, MEGATRON)
        yield attention, "core_attention", CoreAttention(ours, self._turn, attention.core_attention)
        if layer.rotary is not None:
            yield attention, "rotary_pos_emb", self._layer_rotaries[layer.rotary.key]


@contextlib.contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Switches modules to eval mode, and each back to its former mode afterwards."""
    training = [module for module in modules if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def replaced(replacements: Sequence[Replacement]) -> Iterator[None]:
    """Installs replacements of submodules, and restores the originals afterwards."""
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    try:
        for owner, name, ours in replacements:
            setattr(owner, name, ours)
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)
