"""New weights in a model that has run: it computes what one that had them from the beginning computes."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from types import FunctionType, ModuleType

import pytest
import torch
from support.models.cases import CASES, SMALL, prompt
from support.models.export import export
from support.models.harness import Bench, random_model
from torch import nn

from headrace.models import registry
from headrace.models.decoder import Decoder
from headrace.models.kinds import model_tensors
from headrace.models.update import weight_update

NAMES = ["llama-tied", "gemma3-images", "gemma4-experts", "gpt-oss", "mimo", "ernie-moe", "deepseek-v3"]
"""Fused and interleaved matrices, layouts of their own, stacked experts, names of something larger."""
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in sorted(CASES) if name not in NAMES]


def logits(model: Decoder) -> torch.Tensor:
    bench = Bench(model)
    return bench.step([(bench.sequence(prompt(17)), 17)])


def reachable(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that the model refers to, with the class of what holds it."""
    seen, found = set[int](), [("", model)]
    while found:
        holder, one = found.pop()
        if id(one) in seen or isinstance(one, (type, ModuleType, FunctionType)):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            yield holder, one
        else:
            holder = holder if type(one) in (dict, list, tuple) else type(one).__name__
            found += [(holder, other) for other in gc.get_referents(one)]


@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_every_tensor_is_dropped_kept_or_a_table_of_angles(name: str) -> None:
    _, config_class, changes = CASES[name]
    model = random_model(registry.model_spec(config_class(**SMALL | changes)))
    logits(model)
    tensors = model_tensors(model)
    places = [{one.untyped_storage().data_ptr() for one in kind} for kind in tensors]
    assert not places[0] & places[1]
    own = [one for one in reachable(model) if not one[1].is_meta and one[1].numel()]
    assert {holder for holder, one in own if one.untyped_storage().data_ptr() not in places[0] | places[1]} <= {"RotaryTable"}


@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_nothing_is_left_of_the_old_weights(name: str) -> None:
    _, config_class, changes = CASES[name]
    spec = registry.model_spec(config_class(**SMALL | changes))
    model, other = random_model(spec), random_model(spec, seed=1)
    before = logits(model)
    table = registry.name_table(spec)
    weights = {table_name: value.clone() for table_name, value in export(table, other)}
    for dropped in model_tensors(model).weights:  # As after sleep.
        dropped.data.fill_(torch.nan)
    assert weight_update(model, weights).write() == len(weights)
    assert not torch.equal(logits(model), before)
    torch.testing.assert_close(logits(model), logits(other), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["llama-tied", "gpt-oss"])
def test_any_order_and_split_gives_the_same_weights(name: str) -> None:
    """Parts of a fused matrix in loads of their own, in whatever order, one tensor at a time or all."""
    _, config_class, changes = CASES[name]
    spec = registry.model_spec(config_class(**SMALL | changes))
    model, other = random_model(spec), random_model(spec, seed=1)
    weights = {table_name: value.clone() for table_name, value in export(registry.name_table(spec), other)}
    for seed in range(4):
        choose, names = random.Random(seed), list(weights)
        choose.shuffle(names)
        for dropped in model_tensors(model).weights:
            dropped.data.fill_(torch.nan)
        size = (1, 2, 7, len(names))[seed]
        for first in range(0, len(names), size):
            weight_update(model, {one: weights[one] for one in names[first : first + size]}).write()
        for (where, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(ours, theirs), where
