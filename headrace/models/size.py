"""What a model's parameters will take, told by the model itself: it is built on the meta device, where nothing is allocated."""

from __future__ import annotations

import dataclasses

from headrace.layers.linear import Linear
from headrace.models import registry
from headrace.spec import ModelSpec


@dataclasses.dataclass(frozen=True)
class ModelSize:
    nbytes: int
    """Of all parameters, those that are tied once."""
    packable: int
    """Numbers in the matrices that ``quantization`` packs."""


def model_size(spec: ModelSpec, dtype: str) -> ModelSize:
    """Of a native model in ``dtype``; parameters that a family keeps in another one count as they are.

    Raises:
        ConfigError: no family is of the spec's architecture.
    """
    model = registry.build(spec, dtype, "meta")
    packable = sum(module.weight.numel() for module in model.modules() if isinstance(module, Linear))
    return ModelSize(sum(parameter.nbytes for parameter in model.parameters()), packable)
