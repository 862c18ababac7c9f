"""Checks new weights for a native or foreign model."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from headrace.errors import ConfigError
from headrace.layers.linear import Linear
from headrace.layers.moe import Experts
from headrace.models import registry
from headrace.models.decoder import Decoder
from headrace.models.vision.interface import VISION_NAME
from headrace.weights.update import Named, TensorFacts, WeightUpdate, WholeUpdate


def packed_layers(model: Decoder) -> dict[str, Linear]:
    """Layers that hold a parameter in another form, by its name."""
    found = {}
    for path, layer in model.named_modules():
        if isinstance(layer, Linear) and "weight" not in layer._parameters:
            tied = layer is model.lm_head and model.spec.tie_word_embeddings
            found["embed_tokens.weight" if tied else f"{path}.weight"] = layer
    return found


def packed_experts(model: Decoder) -> dict[str, Experts]:
    """The same of experts. Not all formats take new values: ``ExpertsMethod.rounds``."""
    return {
        f"{path}.{matrix}": layer
        for path, layer in model.named_modules()
        if isinstance(layer, Experts)
        for matrix in layer.shapes
        if matrix not in layer._parameters
    }


def update_plan(model: Any, facts: Iterable[TensorFacts], *, with_encoder: bool = False) -> WeightUpdate:
    """Finds places for tensors. Names are those of checkpoints; for a foreign model, its library's.

    Args:
        with_encoder: the model has a vision encoder, which is not updated.

    Raises:
        ConfigError: as ``WeightUpdate``; or a weight is of the encoder, which would keep its old values.
    """
    facts = list(facts)
    for one in facts:
        if with_encoder and VISION_NAME.fullmatch(one.name):
            raise ConfigError(f"{one.name} is of the vision encoder, which is not updated: leave it out", "tensors")
    if isinstance(model, Decoder):
        table, parameters = registry.name_table(model.spec), dict(model.named_parameters())
        return WeightUpdate(table, parameters, facts, packed_layers(model), packed_experts(model))
    return model.update_plan(facts)  # type: ignore[no-any-return]


def weight_update(model: Any, tensors: Named, *, with_encoder: bool = False) -> WholeUpdate:
    """Checks new values, without writing them. Raises: ConfigError: as ``update_plan`` and ``WholeUpdate``."""
    return WholeUpdate(functools.partial(update_plan, model, with_encoder=with_encoder), tensors)
