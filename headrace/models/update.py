"""New weights for a model that was built, whoever built it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from headrace.models import registry
from headrace.models.decoder import Decoder
from headrace.models.implementation import Built
from headrace.weights.update import Named, WeightUpdate


@runtime_checkable
class Foreign(Protocol):
    """A library's model, which knows its weights by the library's names."""

    def weight_update(self, tensors: Named) -> WeightUpdate: ...


def weight_update(model: Built, tensors: Named) -> WeightUpdate:
    """New values, checked and not written yet: of ours under the names of checkpoints, of a library's under the library's.

    Raises:
        ConfigError: as ``WeightUpdate``.
    """
    if isinstance(model, Foreign):
        return model.weight_update(tensors)
    if not isinstance(model, Decoder):
        raise TypeError(f"a {type(model).__name__} has no names of its weights")
    return WeightUpdate(registry.name_table(model.spec), dict(model.named_parameters()), tensors)
