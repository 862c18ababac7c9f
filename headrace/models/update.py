"""Checks new weights for a native or foreign model."""

from __future__ import annotations

from typing import Any

from headrace.models import registry
from headrace.models.decoder import Decoder
from headrace.weights.update import Named, WeightUpdate


def weight_update(model: Any, tensors: Named) -> WeightUpdate:
    """Checks new values, without writing them. Names are those of checkpoints; for a foreign model, its library's.

    Raises:
        ConfigError: as ``WeightUpdate``.
    """
    if isinstance(model, Decoder):
        return WeightUpdate(registry.name_table(model.spec), dict(model.named_parameters()), tensors)
    return model.weight_update(tensors)  # type: ignore[no-any-return]
