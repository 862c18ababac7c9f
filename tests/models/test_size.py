"""The size of a model's weights is known before they are loaded, for every family."""

from __future__ import annotations

import pytest
from support.models.cases import CASES, SMALL

from headrace.models import registry
from headrace.models.size import weight_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_the_estimate_is_what_is_built(name: str, dtype: str) -> None:
    """The estimate is exact to the byte: embeddings for each layer, biases, norms, and tensors kept in float32 whatever the
    dtype is."""
    _, config_class, changes = CASES[name]
    spec = registry.model_spec(config_class(**{**SMALL, **changes}))
    model = registry.build(spec, dtype, "meta")
    assert weight_bytes(spec, dtype, "none", "cpu") == sum(parameter.nbytes for parameter in model.parameters()) > 0
