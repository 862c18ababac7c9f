"""Weights that are written into a quantised model: it holds what one that was loaded with them holds, in the same memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.errors import ConfigError
from headrace.models import registry
from headrace.models.decoder import Decoder
from headrace.models.kinds import model_tensors, own_weights
from headrace.models.update import update_plan, weight_update
from headrace.weights.checkpoint import DummyCheckpoint
from headrace.weights.load import load_weights

from .models import config, files, spec
from .test_compressed_tensors import model_files

CPU = torch.device("cpu")


def loaded(hf_config: Any, quantization: str, seed: int) -> Decoder:
    model = registry.build(spec(hf_config), "bfloat16", "cpu", to_load=True)
    table = registry.name_table(model.spec)
    load_weights(model, table, files(hf_config, "dummy", []), device=CPU, quantization=quantization, seed=seed)
    return model


def held(model: Decoder) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compares bits: FP8 has no comparison everywhere."""
    return one.dtype == other.dtype and torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


@pytest.mark.usefixtures("with_or_without_native")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantization", ["int4", "int8", "fp8", "fp8_per_block"])
def test_a_quantised_model_takes_new_floats(quantization: str, tied: bool) -> None:
    hf_config = config(tie_word_embeddings=tied)
    model, expected = (loaded(hf_config, quantization, seed) for seed in (0, 1))
    whole = registry.build(spec(hf_config), "bfloat16", "meta")
    parameters, table = dict(whole.named_parameters()), registry.name_table(whole.spec)
    like = {
        name: torch.empty(part.stored_shape(parameters[part.parameter]), dtype=torch.bfloat16, device="meta")
        for name, part in table.items()
    }
    values = DummyCheckpoint(like, 1)
    before = {name: tensor.data_ptr() for name, tensor in held(model).items()}
    old = {name: tensor.clone() for name, tensor in held(model).items()}
    assert weight_update(model, {name: values.read(name) for name in like}).write() == len(like)
    assert {name: tensor.data_ptr() for name, tensor in held(model).items()} == before
    for name, tensor in held(expected).items():
        assert same(held(model)[name], tensor), name
    assert not all(same(old[name], now) for name, now in held(model).items())
    again = DummyCheckpoint(like, 0)
    assert weight_update(model, {name: again.read(name) for name in like}).write() == len(like)
    assert all(same(old[name], now) for name, now in held(model).items()), "a second update is as good as the first"


def test_parts_of_one_matrix_come_together() -> None:
    model = loaded(config(), "fp8", 0)
    table = registry.name_table(model.spec)
    q, *_ = names = table.names("layers.0.self_attn.qkv_proj.weight")
    rows = model.layers[0].self_attn.qkv_proj.parts["q_proj"]
    with pytest.raises(ConfigError, match=f"{q} is packed as one matrix with {names[1]}, {names[2]}"):
        weight_update(model, {q: torch.zeros(rows, model.spec.hidden_size)})


@pytest.mark.parametrize(("preset", "quantization"), [("W4A16_ASYM", "int4"), ("FP8", "fp8"), ("FP8", "none")])
def test_codes_of_files_are_read_again(preset: str, quantization: str, tmp_path: Path) -> None:
    """Weights that were dropped have the very codes of the files again, which floats would be rounded to anew."""
    model_files(tmp_path, preset, ["lm_head"])
    raw = json.loads((tmp_path / "config.json").read_text())
    hf_config = config(quantization_config=raw["quantization_config"])
    found = files(hf_config, "safetensors", [tmp_path / "model.safetensors"])
    model = registry.build(spec(hf_config), "bfloat16", "cpu", to_load=True)
    load_weights(model, registry.name_table(model.spec), found, device=CPU, quantization=quantization)
    places = {name: tensor.data_ptr() for name, tensor in held(model).items()}
    before = {name: tensor.clone() for name, tensor in held(model).items()}
    for tensor in model_tensors(model).weights:
        tensor.data.untyped_storage().fill_(0)
    source = own_weights(model, found, 0, CPU)
    update = update_plan(model, source.facts)
    for name, tensor in source.tensors():
        update.put(name, tensor)
    update.finish()
    source.close()
    assert not update.unwritten(update.written)
    for name, tensor in held(model).items():
        assert same(before[name], tensor), name
        assert tensor.data_ptr() == places[name]
