"""The vision part of a quantised checkpoint has the weights that its floats are."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from support.models import tiny_vision

from headrace.config import EngineArgs
from headrace.models import registry
from headrace.models.vision.encoder import TransformersEncoder, load_encoder
from headrace.quant.float_codes import TileCodes
from headrace.sources.files import find_model
from headrace.weights.load import load_weights


def encoder(folder: Path) -> TransformersEncoder:
    files = find_model(EngineArgs(model=str(folder)))
    spec = registry.model_spec(files.config)
    assert spec.vision is not None
    loaded = load_encoder(files, spec.vision, "float32", "cpu", 0)
    assert loaded is not None
    model = registry.build(spec, "float32", "cpu")
    load_weights(model, registry.name_table(spec), files)
    return loaded


def test_a_quantised_vision_part(tmp_path: Path) -> None:
    tiny_vision.save("qwen2_5_vl", tmp_path)
    path = tmp_path / "model.safetensors"
    held, meant = {}, {}
    for name, tensor in load_file(path).items():
        held[name] = meant[name] = tensor
        if tensor.dim() == 2 and name.endswith(("_proj.weight", "qkv.weight")):
            codes = (100 * tensor).to(torch.float8_e4m3fn)
            scales = torch.rand(-(-tensor.shape[0] // 16), -(-tensor.shape[1] // 16)) / 50
            held |= {name: codes, f"{name}_scale_inv": scales}
            meant[name] = TileCodes(codes, scales, (16, 16)).dequantize()
    assert any("visual" in name for name in held.keys() - meant.keys())
    save_file(meant, path, metadata={"format": "pt"})
    expected = dict(encoder(tmp_path)._parts.named_parameters())
    config = json.loads((tmp_path / "config.json").read_text())
    scheme = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}))
    save_file(held, path, metadata={"format": "pt"})
    loaded = dict(encoder(tmp_path)._parts.named_parameters())
    assert loaded.keys() == expected.keys()
    for name, parameter in loaded.items():
        assert torch.equal(parameter, expected[name]), name
