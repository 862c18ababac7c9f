"""The tensors of a model by kind: which of them an update writes, and which must survive when their memory is given back.

Everything else that a model refers to on its device is made of its configuration, as rotary tables are. On a GPU it is kept
while the engine sleeps, with the runner's own tables and buffers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from headrace.errors import ConfigError
from headrace.layers.linear import Linear
from headrace.models import registry
from headrace.models.adapters import adapter_targets
from headrace.models.decoder import Decoder
from headrace.models.update import packed_experts, packed_layers
from headrace.sources.files import ModelFiles
from headrace.weights.load import open_checkpoint
from headrace.weights.transport.source import OpenCheckpoint, OpenSource


class ModelTensors(NamedTuple):
    """Tensors of a model. No two of different kinds share memory."""

    weights: list[torch.Tensor]
    """Weights, in whatever form: the model's files read again write every number of them, and so does an update of all weights,
    but for ``from_files``."""
    kept: list[torch.Tensor]
    """Vision encoders, constants, counters, and the tables of adapters."""


def model_tensors(model: Any) -> ModelTensors:
    """Sorts the parameters and buffers of a native or foreign model."""
    if not isinstance(model, Decoder):
        weights = list(model.tensors_to_update().values())
        for layer in (module for module in model.modules() if isinstance(module, Linear)):
            weights += [*_packed_weights(layer), *layer.parameters()]
        return ModelTensors(weights, _beside(weights, model))
    weights = list(model.parameters())
    for layer in packed_layers(model).values():
        weights += _packed_weights(layer)
    for name, experts in packed_experts(model).items():
        matrix, constants = name.rpartition(".")[2], experts.method.constants
        own = (one for leaf, one in experts.named_buffers() if leaf.startswith(f"{matrix}_") and not leaf.endswith(constants))
        weights += own
    kept = _beside(weights, model)
    if (targets := adapter_targets(model)) is not None:
        kept.append(targets.memory)
    return ModelTensors(weights, kept)


def warm_up(model: Any, most_tokens: int) -> None:
    """Runs what steps of at most so many tokens may need and the largest one has not, on a GPU."""
    if (targets := adapter_targets(model)) is not None:
        targets.warm_up(most_tokens)


def from_files(model: Any) -> set[str]:
    """Names of tensors that only the model's files write: experts in formats to which no floats are rounded."""
    if not isinstance(model, Decoder):
        return set()
    table, experts = registry.name_table(model.spec), packed_experts(model)
    coded = [name for name, layer in experts.items() if not layer.method.rounds(name.rpartition(".")[2])]
    return {name for parameter in coded for name in table.names(parameter)}


def own_weights(model: Any, files: ModelFiles, seed: int, device: torch.device) -> OpenSource:
    """Opens the files that a model was loaded from, as a source of an update.

    Raises:
        ConfigError: an update from them would not give the weights that loading gave.
    """
    if not isinstance(model, Decoder):
        raise ConfigError("a foreign library's model is not loaded again: update its weights", "model")
    table = registry.name_table(model.spec)
    dtype = model.embed_tokens.weight.dtype
    packed = {
        name: torch.empty(layer.out_features, layer.in_features, dtype=dtype, device="meta")
        for name, layer in packed_layers(model).items()
    }
    for name, experts in packed_experts(model).items():
        packed[name] = torch.empty(experts.shapes[name.rpartition(".")[2]], dtype=dtype, device="meta")
    checkpoint = open_checkpoint(model, table, files, seed, device, packed)
    table = table.chosen(checkpoint.tensors)

    def wanted(name: str) -> bool:
        return table.part(name) is not None or table.tied(name) is not None

    try:
        return OpenCheckpoint(checkpoint, wanted, coded=True)
    except BaseException:
        checkpoint.close()
        raise


def _packed_weights(layer: Linear) -> list[torch.Tensor]:
    return [buffer for name, buffer in layer.named_buffers(recurse=False) if name not in layer.method.constants]


def _beside(weights: list[torch.Tensor], model: nn.Module) -> list[torch.Tensor]:
    taken = {tensor.untyped_storage().data_ptr() for tensor in weights}
    own = [*model.parameters(), *model.buffers()]
    return [tensor for tensor in own if tensor.untyped_storage().data_ptr() not in taken]
