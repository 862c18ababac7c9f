"""New weights in a model that has run: it computes what one that had them from the beginning computes."""

from __future__ import annotations

import pytest
import torch
from support.models.cases import CASES, SMALL, prompt
from support.models.export import export
from support.models.harness import Bench, random_model

from headrace.models import registry
from headrace.models.decoder import Decoder
from headrace.models.update import weight_update

NAMES = ["llama-tied", "gemma3-images", "gemma4-experts", "gpt-oss", "mimo", "ernie-moe", "deepseek-v3"]
"""Fused and interleaved matrices, layouts of their own, stacked experts, names of something larger."""


def logits(model: Decoder) -> torch.Tensor:
    bench = Bench(model)
    return bench.step([(bench.sequence(prompt(17)), 17)])


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_left_of_the_old_weights(name: str) -> None:
    _, config_class, changes = CASES[name]
    spec = registry.model_spec(config_class(**SMALL | changes))
    model, other = random_model(spec), random_model(spec, seed=1)
    before = logits(model)
    table = registry.name_table(spec)
    weights = {table_name: value.clone() for table_name, value in export(table, other)}
    assert weight_update(model, weights).write() == len(weights)
    assert not torch.equal(logits(model), before)
    torch.testing.assert_close(logits(model), logits(other), rtol=0, atol=0)
