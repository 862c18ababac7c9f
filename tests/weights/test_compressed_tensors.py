"""Checkpoints of compressed-tensors mean what the library that writes them decompresses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.compressors.model_compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from headrace.errors import ConfigError
from headrace.layers.linear import Linear
from headrace.layers.stored import StoredMatrix
from headrace.models import registry
from headrace.quant.formats.find import find_scheme
from headrace.quant.groups import GroupCodes
from headrace.quant.wna16 import Int4GpuMethod, Int8GpuMethod
from headrace.weights.load import load_weights
from headrace.weights.names import Slice
from headrace.weights.safetensors import SafetensorsCheckpoint
from headrace.weights.scaled import ScaledCheckpoint

from .models import config, files, spec

PRESETS = [
    *("W4A16", "W4A16_ASYM", "W8A16", "W8A8", "W4A8", "W4AFP8"),
    *("FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4", "NVFP4A16", "MXFP4", "MXFP4A16", "MXFP4XFP8"),
]
REFUSED = {
    "W3A16": "weights.num_bits 3",
    "W5A8": "weights.num_bits 5",
    "W4A4": "input_activations.num_bits 4",
    "MXFP8": "format 'mxfp8-quantized'",
    "MXFP6A16": "format 'mxfp6-pack-quantized'",
}


def scheme_of(preset: str, **changes: Any) -> QuantizationScheme:
    scheme = preset_name_to_scheme(preset, ["Linear"])
    for name, value in changes.items():
        setattr(scheme.weights, name, value)
    return scheme


def grouped(weight: torch.Tensor, scheme: QuantizationScheme) -> torch.Tensor:
    """The numbers that share a scale on the last axes, ``[rows of scales, columns of scales, ...]``."""
    args = scheme.weights
    assert args is not None
    rows, columns = weight.shape
    high, wide = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "block": tuple(args.block_structure or (1, 1)),
    }.get(args.strategy, (1, args.group_size))
    padded = torch.nn.functional.pad(weight, (0, -columns % wide, 0, -rows % high))
    return padded.unfold(0, high, high).unfold(1, wide, wide)


def parameters(weight: torch.Tensor, scheme: QuantizationScheme) -> dict[str, torch.Tensor]:
    """Scales and zero points of a matrix, as the library computes them from extremes."""
    args = scheme.weights
    assert args is not None
    tiles = grouped(weight, scheme)
    low, high = tiles.amin((-2, -1)), tiles.amax((-2, -1))
    extra, factor = {}, None
    if args.strategy == "tensor_group":
        factor = extra["weight_global_scale"] = (448 * 6 / weight.abs().amax()).reshape(1)
    scale, zero = calculate_qparams(low, high, args, global_scale=factor)
    if args.strategy == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    return {"weight": weight, "weight_scale": scale, "weight_zero_point": zero, **extra}


def compressed(
    weight: torch.Tensor, scheme: QuantizationScheme
) -> tuple[dict[str, torch.Tensor], torch.Tensor, dict[str, Any]]:
    """The stored tensors of a matrix, what the library makes of them, and the configuration."""
    name = infer_module_format(torch.nn.Linear, scheme)
    compressor = BaseCompressor.get_value_from_registry(name.value)
    stored = compressor.compress(parameters(weight, scheme), scheme)
    meant = compressor.decompress(dict(stored), scheme)["weight"]
    full = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"], format=name.value)
    return {leaf: tensor.contiguous() for leaf, tensor in stored.items()}, meant, full.model_dump(mode="json")


def opened(folder: Path, stored: dict[str, torch.Tensor], scheme: dict[str, Any]) -> ScaledCheckpoint:
    save_file({f"model.m.{leaf}": tensor for leaf, tensor in stored.items()}, folder / "model.safetensors")
    inner = SafetensorsCheckpoint([folder / "model.safetensors"])
    return ScaledCheckpoint(inner, find_scheme(config(quantization_config=scheme)))


def random(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_read_bit_for_bit(preset: str, tmp_path: Path) -> None:
    """Neither rows nor, with tiles, columns are whole words or tiles."""
    weight = random(100, 200 if preset == "FP8_BLOCK" else 256)
    stored, meant, scheme = compressed(weight, scheme_of(preset))
    checkpoint = opened(tmp_path, stored, scheme)
    assert list(checkpoint.tensors) == ["model.m.weight"]
    assert checkpoint.tensors["model.m.weight"].shape == weight.shape
    got = checkpoint.read("model.m.weight")
    assert torch.equal(got.to(meant.dtype), meant)
    assert float((got - weight).norm() / weight.norm()) < 0.2
    codes = checkpoint.codes("model.m.weight")
    assert codes is not None
    assert torch.equal(codes.dequantize(), got)
    for axis, ranges in ((0, ((3, 17), (50, 51))), (1, ((0, 40), (65, 131)))):
        where = Slice(axis, ranges)
        assert torch.equal(checkpoint.read("model.m.weight", where), where.of(got))


@pytest.mark.parametrize(
    "changes",
    [{"strategy": "channel", "group_size": None}, {"group_size": 32}, {"strategy": "tensor", "group_size": None}],
    ids=["channel", "group-32", "tensor"],
)
@pytest.mark.parametrize("preset", ["W4A16", "W4A16_ASYM", "W8A16"])
def test_other_groups_of_integers(preset: str, changes: dict[str, Any], tmp_path: Path) -> None:
    if preset == "W4A16_ASYM" and changes.get("strategy") == "tensor":
        pytest.skip("the library packs no zero point of a tensor")
    # 4 bits and 8 bits: not whole words.
    weight = random(36, 96 if changes.get("group_size") else 93)
    stored, meant, scheme = compressed(weight, scheme_of(preset, **changes))
    checkpoint = opened(tmp_path, stored, scheme)
    assert torch.equal(checkpoint.read("model.m.weight"), meant)
    check_held_by_gpus(checkpoint, meant)


def check_held_by_gpus(checkpoint: ScaledCheckpoint, meant: torch.Tensor) -> None:
    """Scales are float32 here, so that a product with a zero point may be rounded."""
    codes = checkpoint.codes("model.m.weight")
    assert isinstance(codes, GroupCodes)
    method = Int4GpuMethod() if codes.bits == 4 else Int8GpuMethod()
    layer = Linear(*reversed(meant.shape), dtype=torch.bfloat16, device="cpu")
    method.allocate(layer, torch.bfloat16, "cpu")
    assert method.load(layer, [StoredMatrix("I32", codes.dequantize, lambda: codes)]) == 0
    torch.testing.assert_close(method.dequantize(layer), meant.float(), rtol=0, atol=2.0**-22 * float(meant.abs().max()))


@pytest.mark.parametrize("preset", ["W4A16", "W4A16_ASYM", "W8A16"])
def test_presets_of_integers_are_held_by_gpus(preset: str, tmp_path: Path) -> None:
    stored, meant, scheme = compressed(random(100, 256), scheme_of(preset))
    check_held_by_gpus(opened(tmp_path, stored, scheme), meant)


def test_act_order(tmp_path: Path) -> None:
    """Inputs are in groups by ``weight_g_idx``, each with the scale of its group."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(256, generator=generator) // 128
    weight = random(16, 256)
    by_group = weight[:, order.argsort(stable=True)]
    stored, meant, scheme = compressed(by_group, scheme_of("W4A16_ASYM"))
    scheme["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    # The library packs in the order of groups; writers of act-order put the codes back before.
    back = order.argsort(stable=True).argsort()
    codes = opened(tmp_path, stored, scheme).codes("model.m.weight")
    assert isinstance(codes, GroupCodes)
    words = torch.zeros(16, 32, dtype=torch.int32)
    for place in range(8):
        words |= codes.codes[:, back].int()[:, place::8] << (4 * place)
    held = stored | {"weight_packed": words, "weight_g_idx": order.int()}
    checkpoint = opened(tmp_path, held, scheme)
    got = checkpoint.read("model.m.weight")
    assert torch.equal(got, meant[:, back])
    ordered = checkpoint.codes("model.m.weight")
    assert isinstance(ordered, GroupCodes)
    assert torch.equal(ordered.order, order)
    for ranges in (((0, 100),), ((77, 200),)):
        assert torch.equal(checkpoint.read("model.m.weight", Slice(1, ranges)), Slice(1, ranges).of(got))
    # In their usual places, and where a writer left the tensor unused.
    for usual in (torch.arange(256) // 128, torch.full((256,), -1)):
        plain = opened(tmp_path, stored | {"weight_g_idx": usual.int()}, scheme).codes("model.m.weight")
        assert isinstance(plain, GroupCodes)
        assert plain.order is None
        assert torch.equal(plain.dequantize(), meant)
    beyond = opened(tmp_path, stored | {"weight_g_idx": torch.full((256,), 2).int()}, scheme)
    with pytest.raises(ConfigError, match="has groups from 2 to 2, and there are 2"):
        beyond.read("model.m.weight")


def test_zero_points_that_are_not_packed(tmp_path: Path) -> None:
    weight = random(20, 256)
    stored, meant, scheme = compressed(weight, scheme_of("W4A16_ASYM"))
    zeros = parameters(weight, scheme_of("W4A16_ASYM"))["weight_zero_point"]
    checkpoint = opened(tmp_path, stored | {"weight_zero_point": zeros.to(torch.int8)}, scheme)
    assert torch.equal(checkpoint.read("model.m.weight"), meant)


@pytest.mark.parametrize("preset", REFUSED)
def test_other_presets_are_refused(preset: str) -> None:
    scheme = scheme_of(preset)
    name = infer_module_format(torch.nn.Linear, scheme)
    full = QuantizationConfig(config_groups={"group_0": scheme}, format=name.value).model_dump(mode="json")
    with pytest.raises(ConfigError, match=REFUSED[preset]) as caught:
        find_scheme(config(quantization_config=full))
    assert caught.value.param == "quantization_config"


def model_files(folder: Path, preset: str, ignore: list[str]) -> LlamaForCausalLM:
    """Saves a quantised model, and returns it decompressed."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(config(torch_dtype="float32")).eval()
    scheme = scheme_of(preset)
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=ignore))
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            for name, value in parameters(module.weight.data, scheme).items():
                if name != "weight":
                    module._parameters.pop(name, None)
                    module.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    compressor = ModelCompressor.from_pretrained_model(model)
    assert compressor is not None
    compressor.compress_model(model)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    model.config.save_pretrained(folder)
    compressor.update_config(str(folder))
    compressor.decompress_model(model)
    return model


@pytest.mark.parametrize(
    ("preset", "ignore"),
    [
        ("W4A16_ASYM", ["lm_head"]),
        ("FP8", ["lm_head", "re:.*v_proj"]),
        pytest.param("FP8_BLOCK", ["lm_head", "model.layers.0.mlp.up_proj"], marks=pytest.mark.slow),
        pytest.param("NVFP4A16", [], marks=pytest.mark.slow),
    ],
)
def test_a_model_holds_what_the_library_decompresses(preset: str, ignore: list[str], tmp_path: Path) -> None:
    """Parts of a fused matrix have scales of their own, and some are stored as floats."""
    theirs = model_files(tmp_path, preset, ignore)
    raw = json.loads((tmp_path / "config.json").read_text())
    hf_config = config(quantization_config=raw["quantization_config"])
    ours = registry.build(spec(hf_config), "float32", "cpu")
    paths = [tmp_path / "model.safetensors"]
    report = load_weights(ours, registry.name_table(ours.spec), files(hf_config, "safetensors", paths))
    held = theirs.state_dict()
    table = registry.name_table(ours.spec)
    loaded = dict(ours.named_parameters())
    for name, part in table.items():
        # The library decompresses 4-bit floats to bfloat16.
        assert torch.equal(part.view(loaded[part.parameter]).to(held[name].dtype), held[name]), name
    (decision,) = report.decisions
    quantised = sum(getattr(module, "quantization_scheme", None) is not None for module in theirs.modules())
    assert quantised >= 12
    assert decision.value.startswith(f"{quantised} of ")
    assert decision.reason == f"{16 - quantised} further matrices are stored as floats"
