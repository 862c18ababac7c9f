"""Models of transformers whose matrices are held in fewer bits, by the methods of native models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import tiny_models
from support.models.architectures import quiet
from support.models.foreign import decisions, engine, model_of, tokens_of
from support.models.packers import Rounded

from headrace import LLM
from headrace.errors import ConfigError
from headrace.models.fallback.transformers.model import PackedMatrix
from headrace.models.update import weight_update

PROMPT = [5, 6, 7, 8, 9, 10, 11]


def folder_of(kind: str, to: Path) -> Path:
    """Sizes that the methods hold."""
    with quiet():
        tiny_models.save(tiny_models.model(kind, hidden_size=64, intermediate_size=96), to)
    return to


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """q, k and v with biases."""
    return folder_of("qwen2", tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def packed(qwen: Path) -> LLM:
    with quiet():
        return engine(qwen, quantization="int8")


def packed_of(llm: LLM) -> list[PackedMatrix]:
    return list(model_of(llm).packed)


def dequantised(llm: LLM, folder: Path, to: Path) -> Path:
    """A checkpoint of the floats that the packed matrices of a model stand for."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    weights = load_file(to / "model.safetensors")
    for one in packed_of(llm):
        rows = list(one.rows.values())
        for path, part in zip(one.rows, one.layer.method.dequantize(one.layer).split(rows), strict=True):
            assert part.shape == weights[f"{path}.weight"].shape
            weights[f"{path}.weight"] = part.contiguous()
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


def test_products_are_those_of_the_dequantised_weights(packed: LLM, qwen: Path, tmp_path: Path) -> None:
    with quiet():
        floats = engine(dequantised(packed, qwen, tmp_path))
    assert tokens_of(packed, PROMPT, 12) == tokens_of(floats, PROMPT, 12)
    names = {name for name, _ in model_of(packed).foreign.named_parameters()}
    assert not any("_proj.weight" in name for name in names)
    assert len(packed_of(packed)) == 12


def test_the_report_names_formats_reasons_and_bytes(packed: LLM) -> None:
    said = decisions(packed)
    value, why = said["format of model.layers.*.self_attn.q_proj+k_proj+v_proj (3 layers)"]
    assert value == packed_of(packed)[0].layer.method.format
    assert "stored as float32, rounded to" in why
    lines = {line.name: line.nbytes for line in packed.info.memory}
    held = sum(tensor.nbytes for one in packed_of(packed) for tensor in one.buffers())
    assert lines["packed weights"] == held
    assert lines["weights"] == sum(one.nbytes for one in model_of(packed).parameters())


def test_named_matrices_and_routers_stay_floats(tmp_path: Path) -> None:
    with quiet():
        llm = engine(folder_of("mixtral", tmp_path), quantization="int8", quantization_ignore=("o_proj",))
    floats = {name for name, _ in model_of(llm).foreign.named_parameters()}
    assert {"model.layers.0.mlp.gate.weight", "model.layers.0.self_attn.o_proj.weight", "lm_head.weight"} <= floats
    assert "model.layers.0.self_attn.q_proj.weight" not in floats
    tokens_of(llm, PROMPT)


def test_updates_are_rounded_as_loading_rounds(packed: LLM, qwen: Path) -> None:
    """New values of all matrices; and a part of a fused one by itself is refused."""
    before = tokens_of(packed, PROMPT)
    weights = load_file(qwen / "model.safetensors")
    changed = {name: value.flip(0) if "_proj" in name else value for name, value in weights.items()}
    model = model_of(packed)
    with pytest.raises(ConfigError, match=r"q_proj\.weight is packed as one matrix with"):
        weight_update(model, {"model.layers.0.self_attn.q_proj.weight": weights["model.layers.0.self_attn.q_proj.weight"]})
    held = [one.layer.method.dequantize(one.layer) for one in packed_of(packed)]
    assert weight_update(model, changed).write() == len(changed)
    for one, old in zip(packed_of(packed), held, strict=True):
        rows = list(one.rows.values())
        new = one.layer.method.dequantize(one.layer).split(rows)
        for ours, theirs in zip(new, old.split(rows), strict=True):
            assert torch.allclose(ours, theirs.flip(0))
    assert weight_update(model, weights).write() == len(weights)
    packed.reset_prefix_cache()
    assert tokens_of(packed, PROMPT) == before


def test_codes_of_checkpoints_are_kept(tmp_path: Path) -> None:
    folder, floats = tmp_path / "gptq", tmp_path / "floats"
    folder_of("llama", folder)
    floats.mkdir()
    held, meant = {}, load_file(folder / "model.safetensors")
    for name, tensor in list(meant.items()):
        held[name] = tensor
        if "_proj" in name:
            made = Rounded(*tensor.shape, group=32)
            del held[name]
            held |= {f"{name.removesuffix('.weight')}.{leaf}": one for leaf, one in made.gptq().items()}
            meant[name] = made.meant
    config = json.loads((folder / "config.json").read_text())
    shutil.copytree(folder, floats, dirs_exist_ok=True)
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(meant, floats / "model.safetensors", metadata={"format": "pt"})
    scheme = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}))
    with quiet():
        ours, theirs = engine(folder, dtype="auto"), engine(floats)
    assert "multiplied as they are stored" in decisions(ours)["checkpoint format"][1]
    for one in packed_of(ours):
        exact = torch.cat([meant[f"{path}.weight"] for path in one.rows])
        assert torch.equal(one.layer.method.dequantize(one.layer), exact)
    assert len(packed_of(ours)) == 12
    assert tokens_of(theirs, PROMPT)
