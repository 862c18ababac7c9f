"""Models of Megatron-core on headrace's attention.

The modules stay the trainer's. For the length of a step, and no longer, ``core_attention`` of each layer is ours and every
module is in eval mode; between steps the model is as its owner left it, also after an exception. No weight is copied: what
an optimiser writes, the next step reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from headrace.attention.context import ForwardContext
from headrace.models.fallback import weights
from headrace.models.fallback.contract import ContextCell, ForeignLayer, check_layers, finished_logits
from headrace.models.fallback.layout import MEGATRON
from headrace.models.fallback.megatron_describe import MegatronDescription, MegatronLayer
from headrace.models.fallback.megatron_rotary import StepRotary
from headrace.weights.names import NameTable
from headrace.weights.update import Named, WeightUpdate


class CoreAttention(nn.Module):
    """In place of a layer's ``core_attention``.

    Args:
        layer: our attention of it.
        turn: told of each call, before it is computed.
        original: the module that this stands in for, which keeps its parameters; only its sinks are read.
    """

    def __init__(self, layer: ForeignLayer, turn: Turn, original: nn.Module) -> None:
        super().__init__()
        self._layer = layer
        self._turn = turn
        # Not registered: it is the trainer's.
        self._original = (original,)
        self._zeros: torch.Tensor | None = None

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
        asked = sorted(name for name, given in arguments.items() if given is not None)
        if attention_mask is not None:
            asked.append("attention_mask")
        if asked:
            raise ValueError(f"layer {index}: {', '.join(asked)} cannot be given: tokens see those before them")
        return self._layer(query, key, value, self._sinks(query)).flatten(2)

    def _sinks(self, query: torch.Tensor) -> torch.Tensor | None:
        if not self._layer.spec.sinks:
            return None
        learned: torch.Tensor | None = getattr(self._original[0], "softmax_offset", None)
        if learned is not None:
            return learned
        # "off-by-one": one more term in the denominator, which is exp(0).
        if self._zeros is None:
            self._zeros = torch.zeros(self._layer.spec.num_heads, dtype=torch.float32, device=query.device)
        return self._zeros


class Turn:
    """Whose turn it is: layers attend in their order, each once a step."""

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


class MegatronModel(nn.Module):
    """What the runner needs of a model, of a Megatron-core ``GPTModel``.

    Args:
        described: the model and what it is. The model is not registered here as a part: it is its owner's.
    """

    def __init__(self, described: MegatronDescription) -> None:
        super().__init__()
        self.spec = described.spec
        self._described = (described,)
        self._rotary = described.rotary
        self._cell = ContextCell()
        self._turn = Turn(len(described.layers))
        self._replacements = [
            replacement for layer in described.layers for replacement in _replacements(layer, self._cell, self._turn)
        ]
        self._layer_rotaries = [ours for _, _, ours in self._replacements if isinstance(ours, StepRotary)]
        self._modules_of_foreign = list(described.model.modules())
        self._checked = False

    @property
    def described(self) -> MegatronDescription:
        return self._described[0]

    @property
    def foreign(self) -> Any:
        return self.described.model

    @torch.inference_mode()
    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """One step.

        Args:
            input_ids: ``[T]`` int64.
            positions: ``[T]`` int64, absolute.

        Returns:
            ``[T, hidden]``, after the last norm.

        Raises:
            ValueError: the caches are not the layers', or a layer did not attend in its turn.
        """
        if not self._checked:
            check_layers(self.spec.layers, len(ctx.caches))
            self._checked = True
        if not len(input_ids):
            dtype = next(self.foreign.parameters()).dtype
            return torch.empty(0, self.spec.hidden_size, dtype=dtype, device=input_ids.device)
        with self._borrowed(), self._cell.holding(ctx), self._turn.all(), self._turned(positions):
            hidden: torch.Tensor = self.foreign.embedding(input_ids=input_ids[None], position_ids=positions[None])
            angles = None if self._rotary is None else self._rotary.angles(positions)
            hidden = self.foreign.decoder(hidden_states=hidden, attention_mask=None, rotary_pos_emb=angles)
        return hidden[:, 0]

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[N, hidden] -> [N, columns]`` float32, -inf in columns that pad the vocabulary."""
        if not len(hidden):
            return torch.empty(0, self.spec.vocab_size, dtype=torch.float32, device=hidden.device)
        foreign = self.foreign
        shared = foreign.shared_embedding_or_output_weight() if foreign.share_embeddings_and_output_weights else None
        logits, _ = foreign.output_layer(hidden[:, None], weight=shared, runtime_gather_output=True)
        return finished_logits(logits[:, 0], self.spec.num_tokens)

    def name_table(self) -> NameTable:
        """The library's names of the weights."""
        return weights.name_table(self.foreign)

    def weight_update(self, tensors: Named) -> WeightUpdate:
        """New values under the library's names, for the trainer's own tensors; as ``weights.weight_update``."""
        return weights.weight_update(self.foreign, tensors)

    @contextlib.contextmanager
    def _borrowed(self) -> Iterator[None]:
        """The trainer's modules as a step needs them, and afterwards as they were."""
        originals = [(owner, name, getattr(owner, name)) for owner, name, _ in self._replacements]
        with evaluating(self._modules_of_foreign):
            try:
                for owner, name, ours in self._replacements:
                    setattr(owner, name, ours)
                yield
            finally:
                for owner, name, original in originals:
                    setattr(owner, name, original)

    @contextlib.contextmanager
    def _turned(self, positions: torch.Tensor) -> Iterator[None]:
        """Layers that ask for angles themselves are given the step's."""
        if not self._layer_rotaries:
            yield
            return
        made: dict[int, torch.Tensor] = {}
        try:
            for module in self._layer_rotaries:
                key = id(module.rotary)
                if key not in made:
                    made[key] = module.rotary.angles(positions)
                module.angles = made[key]
            yield
        finally:
            for module in self._layer_rotaries:
                module.angles = None


@contextlib.contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """They are in eval mode, and afterwards in the mode that each was in."""
    training = [module for module in modules if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def _replacements(layer: MegatronLayer, cell: ContextCell, turn: Turn) -> Iterator[tuple[Any, str, nn.Module]]:
    """(module, name, what takes the place of its part of that name) for one layer."""
    attention = layer.attention
    ours = ForeignLayer(layer.spec, cell, MEGATRON, MEGATRON)
    yield attention, "core_attention", CoreAttention(ours, turn, attention.core_attention)
    if layer.rotary is not None:
        yield attention, "rotary_pos_emb", StepRotary(layer.rotary)
