"""Inputs of models besides ids and positions: each is compared with the plain pass that it equals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from support.models.cases import pair
from support.models.harness import Bench

from headrace.kernels import native
from headrace.models.decoder import Decoder
from headrace.models.families.gemma4 import Gemma4Decoder
from headrace.models.fused import fuse
from headrace.models.interface import ModelInputs
from models.test_fused import GEOMETRIES, packed

IDS = [5, 17, 3, 40, 22, 8, 11, 60, 2]
FAMILIES = ["llama", "qwen3", "gemma3", "gemma4", "deepseek-v2"]
Change = Callable[[ModelInputs], ModelInputs]


@cache
def model_of(name: str) -> Decoder:
    return pair(name)[1]


def logits_of(model: Decoder, change: Change, ids: list[int] = IDS) -> torch.Tensor:
    """``[T, vocab]``, in two chunks, of which both are changed."""
    bench = Bench(model)
    sequence = bench.sequence(ids)
    return torch.cat([bench.step([(sequence, count)], change=change) for count in (6, len(ids) - 6)])


def plain(inputs: ModelInputs) -> ModelInputs:
    return inputs


def embedded(model: Decoder, inputs: ModelInputs) -> ModelInputs:
    """Gemma 4 knows tokens by their ids besides."""
    ids = inputs.input_ids if isinstance(model, Gemma4Decoder) else torch.zeros_like(inputs.input_ids)
    return dataclasses.replace(inputs, input_ids=ids, inputs_embeds=model.embed(inputs.input_ids))


@pytest.mark.parametrize("name", FAMILIES)
def test_embeddings_of_the_same_ids_give_the_same_logits(name: str) -> None:
    model = model_of(name)
    given = []

    def change(inputs: ModelInputs) -> ModelInputs:
        changed = embedded(model, inputs)
        assert changed.inputs_embeds is not None
        given.append((changed.inputs_embeds, changed.inputs_embeds.clone()))
        return changed

    torch.testing.assert_close(logits_of(model, change), logits_of(model, plain), rtol=0, atol=0)
    assert all(torch.equal(ours, before) for ours, before in given), "the caller's tensor is not written"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_mask_says_which_embeddings_count(name: str) -> None:
    model = model_of(name)

    def change(inputs: ModelInputs) -> ModelInputs:
        mask = inputs.positions % 3 == 1
        embeds = torch.where(mask[:, None], model.embed(inputs.input_ids), torch.nan)
        ids = inputs.input_ids if isinstance(model, Gemma4Decoder) else inputs.input_ids.masked_fill(mask, 0)
        return dataclasses.replace(inputs, input_ids=ids, inputs_embeds=embeds, embeds_mask=mask)

    torch.testing.assert_close(logits_of(model, change), logits_of(model, plain), rtol=0, atol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_rope_positions_turn_in_place_of_positions(name: str) -> None:
    model = model_of(name)
    same = logits_of(model, lambda inputs: dataclasses.replace(inputs, rope_positions=inputs.positions.clone()))
    torch.testing.assert_close(same, logits_of(model, plain), rtol=0, atol=0)

    def stretched(inputs: ModelInputs, field: str) -> ModelInputs:
        return dataclasses.replace(inputs, **{field: inputs.positions * 3 + inputs.positions % 2})

    turned = logits_of(model, partial(stretched, field="rope_positions"))
    torch.testing.assert_close(turned, logits_of(model, partial(stretched, field="positions")), rtol=0, atol=0)
    assert not torch.allclose(turned, same, atol=1e-3)


def test_rope_positions_of_an_unknown_rank_are_refused() -> None:
    model = model_of("llama")
    with pytest.raises(ValueError, match="rope_positions have rank 2; this model's rope takes rank 1"):
        logits_of(model, lambda inputs: dataclasses.replace(inputs, rope_positions=inputs.positions.expand(3, -1)))


@pytest.mark.parametrize("name", FAMILIES)
def test_extras_are_added_behind_their_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(name)
    generator = torch.Generator().manual_seed(0)
    extras = {layer: torch.randn(len(IDS), model.spec.hidden_size, generator=generator) for layer in (0, 2)}

    def change(inputs: ModelInputs) -> ModelInputs:
        return dataclasses.replace(inputs, extras={layer: extra[inputs.positions] for layer, extra in extras.items()})

    ours = logits_of(model, change)
    before = logits_of(model, plain)
    done = dict.fromkeys(extras, 0)
    for index, extra in extras.items():
        layer = model.layers[index]
        run = layer.forward

        def manual(*args: object, run: Callable = run, index: int = index, extra: torch.Tensor = extra) -> object:
            out = run(*args)
            start = done[index]
            done[index] = start + len(args[0])
            rows = extra[start : done[index]]
            return (out[0] + rows, None) if out[1] is None else (out[0], out[1] + rows)

        monkeypatch.setattr(layer, "forward", manual)
    torch.testing.assert_close(ours, logits_of(model, plain), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(ours, before, atol=1e-3)


def test_the_fused_call_declines_extras_and_takes_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = native.load()
    if kernels is None:
        pytest.skip("the native kernels are not available")
    model = packed(GEOMETRIES["norms-and-biases"], "float32", kernels)

    def logits(change: Change) -> torch.Tensor:
        bench = Bench(model, "native")
        return bench.step([(bench.sequence(IDS), len(IDS))], change=change)

    changes: dict[str, Change] = {
        "embeddings": partial(embedded, model),
        "rope": lambda inputs: dataclasses.replace(inputs, rope_positions=inputs.positions + 7),
        "extras": lambda inputs: dataclasses.replace(inputs, extras={0: torch.ones(len(IDS), model.spec.hidden_size)}),
    }
    modules = {name: logits(change) for name, change in changes.items()}
    fuse(model)
    assert model.fused is not None
    calls = []
    fused = type(model.fused).__call__
    monkeypatch.setattr(type(model.fused), "__call__", lambda *args: calls.append(args) or fused(*args))
    for name, change in changes.items():
        assert torch.equal(logits(change), modules[name]), name
    assert len(calls) == 2
