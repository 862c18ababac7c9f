"""Small floats with scales are read as the floats that they mean."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from headrace.errors import ConfigError
from headrace.models import registry
from headrace.parallel.shards import Cut
from headrace.quant.float_codes import MicroscaledCodes, TileCodes
from headrace.quant.formats.find import find_scheme
from headrace.weights.load import load_weights
from headrace.weights.names import Slice
from headrace.weights.safetensors import SafetensorsCheckpoint
from headrace.weights.scaled import ScaledCheckpoint

from .models import config, expected_parameters, files, parameters_of, spec, tensors


def test_mxfp4_number_by_number() -> None:
    """Every code at every position of a byte, by the format's own formula."""
    blocks = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scales = torch.tensor([127, 126, 130, 100, 154, 128, 127, 127, 120, 121, 122, 123, 124, 125, 1, 200], dtype=torch.uint8)
    got = MicroscaledCodes(blocks, scales).dequantize()

    def value(code: int) -> float:
        sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
        magnitude = mantissa * 0.5 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
        return -magnitude if sign else magnitude

    for row in range(16):
        for column in range(16):
            byte = row * 16 + column
            for half, code in enumerate((byte & 15, byte >> 4)):
                expected = math.ldexp(value(code), int(scales[row]) - 127)
                assert float(got.view(16, 32)[row, 2 * column + half]) == expected


def test_mxfp4_equals_transformers() -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 4, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(110, 140, (3, 10, 4), dtype=torch.uint8, generator=generator)
    theirs = convert_moe_packed_tensors(blocks, scales)
    ours = MicroscaledCodes(blocks, scales).dequantize()
    assert ours.shape == (3, 10, 128)
    assert torch.equal(ours.mT if theirs.shape != ours.shape else ours, theirs)


MXFP4 = {"quant_method": "mxfp4"}
FP8 = {"quant_method": "fp8", "weight_block_size": [4, 8]}


def write(path: Path, held: dict[str, torch.Tensor], scheme: dict[str, Any] = FP8) -> ScaledCheckpoint:
    save_file(held, path)
    return opened(path, scheme)


def opened(path: Path, scheme: dict[str, Any] | None) -> ScaledCheckpoint:
    return ScaledCheckpoint(SafetensorsCheckpoint([path]), find_scheme(config(quantization_config=scheme)))


def test_blocks_and_scales_are_one_tensor(tmp_path: Path) -> None:
    blocks, scales = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8), torch.full((2, 6, 3), 127, dtype=torch.uint8)
    checkpoint = write(tmp_path / "a.safetensors", {"w_blocks": blocks, "w_scales": scales, "bias": torch.ones(3)}, MXFP4)
    assert {name: (one.shape, one.kind) for name, one in checkpoint.tensors.items()} == {
        "w_blocks": ((2, 6, 96), "MXFP4"),
        "bias": ((3,), "F32"),
    }
    assert sum(one.nbytes for one in checkpoint.tensors.values()) == blocks.nbytes + scales.nbytes + 12
    assert torch.equal(checkpoint.read("w_blocks"), MicroscaledCodes(blocks, scales).dequantize())
    assert torch.equal(checkpoint.read("bias"), torch.ones(3))


@pytest.mark.parametrize("shape", [(8, 16), (9, 20), (3, 5), (4, 8)])
def test_tiles_of_fp8(shape: tuple[int, int], tmp_path: Path) -> None:
    """Tiles at the edge are cut: a matrix need not be made of whole ones."""
    grid = (-(-shape[0] // 4), -(-shape[1] // 8))
    matrix, scales = torch.randn(shape).to(torch.float8_e4m3fn), torch.rand(grid) + 0.1
    checkpoint = write(tmp_path / "a.safetensors", {"w": matrix, "w_scale_inv": scales})
    got = checkpoint.read("w")
    for row in range(shape[0]):
        for column in range(shape[1]):
            assert got[row, column] == matrix[row, column].float() * scales[row // 4, column // 8]
    assert torch.equal(got, TileCodes(matrix, scales, (4, 8)).dequantize())
    assert list(checkpoint.tensors) == ["w"]


def test_scales_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    blocks = torch.zeros(2, 3, 16, dtype=torch.uint8)
    with pytest.raises(ConfigError, match="w_scales is missing: quant_method mxfp4 means w as mxfp4"):
        write(tmp_path / "a.safetensors", {"w_blocks": blocks}, MXFP4)
    with pytest.raises(ConfigError, match=r"w_scales is of the shape \[2, 4\], not \[2, 3\]"):
        write(tmp_path / "b.safetensors", {"w_blocks": blocks, "w_scales": torch.zeros(2, 4, dtype=torch.uint8)}, MXFP4)
    matrix = torch.zeros(8, 8).to(torch.float8_e4m3fn)
    with pytest.raises(ConfigError, match=r"w_scale_inv is of the shape \[1, 1\], not \[2, 1\]"):
        write(tmp_path / "c.safetensors", {"w": matrix, "w_scale_inv": torch.zeros(1, 1)})
    with pytest.raises(ConfigError, match=r"w_scale_inv is part of a quantised matrix, .* no quantization_config"):
        opened(tmp_path / "c.safetensors", None)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_scales_that_are_no_numbers_are_refused(wrong: float, tmp_path: Path) -> None:
    """With the tensor's name, by the rank that reads them."""
    scales = torch.ones(2, 1)
    scales[1] = wrong
    checkpoint = write(tmp_path / "a.safetensors", {"w": torch.zeros(8, 8).to(torch.float8_e4m3fn), "w_scale_inv": scales})
    for read in (checkpoint.codes, checkpoint.read, lambda name: checkpoint.read(name, Slice(0, ((4, 8),)))):
        with pytest.raises(ConfigError, match="w_scale_inv has scales that are NaN or infinite"):
            read("w")
    assert not checkpoint.read("w", Slice(0, ((0, 4),))).any()
    exponents = torch.full((2, 3), 255, dtype=torch.uint8)
    held = {"w_blocks": torch.zeros(2, 3, 16, dtype=torch.uint8), "w_scales": exponents}
    with pytest.raises(ConfigError, match="w_scales has scales that are NaN"):
        write(tmp_path / "b.safetensors", held, MXFP4).codes("w_blocks")
    scheme = {"quant_method": "fp8", "activation_scheme": "static"}
    matrix = {"m.weight": torch.zeros(8, 8).to(torch.float8_e4m3fn), "m.weight_scale": torch.ones(1)}
    static = write(tmp_path / "c.safetensors", matrix | {"m.input_scale": torch.tensor([wrong])}, scheme)
    with pytest.raises(ConfigError, match=r"m\.input_scale has scales that are NaN"):
        static.spec("m.weight")


def test_a_model_of_fp8_is_loaded(tmp_path: Path) -> None:
    scheme = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [32, 64]}
    hf_config = config(quantization_config=scheme)
    held, meant = {}, {}
    for name, tensor in tensors(hf_config).items():
        if "_proj" not in name:
            held[name] = meant[name] = tensor
            continue
        held[name] = (tensor * 1000).to(torch.float8_e4m3fn)
        held[name + "_scale_inv"] = torch.rand(-(-tensor.shape[0] // 32), -(-tensor.shape[1] // 64))
        meant[name] = TileCodes(held[name], held[name + "_scale_inv"], (32, 64)).dequantize()
    save_file(held, tmp_path / "model.safetensors")
    model = registry.build(spec(hf_config), "float32", "cpu")
    load_weights(model, registry.name_table(model.spec), files(hf_config, "safetensors", [tmp_path / "model.safetensors"]))
    for name, expected in expected_parameters(hf_config, meant).items():
        assert torch.equal(parameters_of(model)[name], expected), name


# One scale for a matrix or for each output, and what comes beside it

STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
CODES = torch.arange(12 * 16).view(12, 16).remainder(120).to(torch.uint8).view(torch.float8_e4m3fn)
EACH = torch.linspace(0.5, 2, 12)


@pytest.mark.parametrize(
    ("scheme", "stored", "scales"),
    [
        (STATIC, {"weight_scale": torch.tensor(0.3), "input_scale": torch.tensor(0.125)}, torch.tensor(0.3)),
        (STATIC, {"weight_scale": torch.tensor([0.3]), "input_scale": torch.tensor([0.125])}, torch.tensor(0.3)),
        (STATIC, {"weight_scale_inv": torch.tensor(0.3), "activation_scale": torch.tensor(0.125)}, torch.tensor(0.3)),
        ({"quant_method": "fp8"}, {"weight_scale": torch.tensor([[0.3]]).bfloat16()}, torch.tensor(0.3).bfloat16()),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            {"weight_scale": torch.tensor(0.3), "input_scale": torch.tensor(0.125)},
            torch.tensor(0.3),
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, {"weight_scale": EACH}, EACH[:, None]),
        ({"quant_method": "fbgemm_fp8"}, {"weight_scale": EACH[:, None]}, EACH[:, None]),
        ({"quant_method": "fbgemm_fp8"}, {"weight_scale": EACH.half()}, EACH.half()[:, None]),
        ({"quant_method": "fp8"}, {"weight_scale": EACH[:, None], "weight_zero_point": torch.zeros(12, 1)}, EACH[:, None]),
    ],
)
def test_one_scale_for_a_matrix_or_for_each_output(
    scheme: dict[str, Any], stored: dict[str, torch.Tensor], scales: torch.Tensor, tmp_path: Path
) -> None:
    """Writers leave out axes of length 1, or add them."""
    held = {f"m.{leaf}": tensor for leaf, tensor in {"weight": CODES, **stored}.items()}
    checkpoint = write(tmp_path / "a.safetensors", held, scheme)
    meant = CODES.float() * scales.float()
    assert list(checkpoint.tensors) == ["m.weight"]
    assert torch.equal(checkpoint.read("m.weight"), meant)
    for axis, ranges in ((0, ((1, 5), (7, 12))), (1, ((3, 9),))):
        assert torch.equal(checkpoint.read("m.weight", Slice(axis, ranges)), Slice(axis, ranges).of(meant))
    codes = checkpoint.codes("m.weight")
    assert isinstance(codes, TileCodes)
    assert codes.tile == ((12, 16) if scales.dim() == 0 else (1, 16))
    for cut in (Cut("outputs", 5, 9, 12), Cut("inputs", 3, 11, 16)):
        assert torch.equal(codes.cut(cut).dequantize(), cut.of(meant))
    found = checkpoint.spec("m.weight")
    assert found is not None
    assert found.group == ("tensor" if scales.dim() == 0 else "channel")
    assert found.input_scale == (0.125 if found.activations == "static" else None)


def test_scales_that_are_exponents(tmp_path: Path) -> None:
    """Scales are exponents, as scale_fmt ue8m0 means in the newest checkpoints."""
    exponents = torch.tensor([[120, 127], [130, 128], [1, 126]], dtype=torch.uint8)
    held = {"m.weight": CODES, "m.weight_scale_inv": exponents.view(torch.float8_e8m0fnu)}
    checkpoint = write(tmp_path / "a.safetensors", held, FP8 | {"scale_fmt": "ue8m0"})
    scales = torch.exp2(exponents.float() - 127)
    meant = CODES.float() * scales.repeat_interleave(4, 0).repeat_interleave(8, 1)
    assert torch.equal(checkpoint.read("m.weight"), meant)
    found = checkpoint.spec("m.weight")
    assert found is not None
    assert found.scale == "e8m0"


def test_stacked_experts_have_tiles_of_their_own(tmp_path: Path) -> None:
    """Also where a matrix is not made of whole ones."""
    experts, scales = torch.stack((CODES[:10], CODES[2:])), torch.rand(2, 3, 2)
    held = {"e.gate_up_proj": experts, "e.gate_up_proj_scale_inv": scales, "e.gate_up_proj_activation_scale": torch.ones(2)}
    checkpoint = write(tmp_path / "a.safetensors", held)
    assert list(checkpoint.tensors) == ["e.gate_up_proj"]
    meant = torch.stack([TileCodes(experts[index], scales[index], (4, 8)).dequantize() for index in range(2)])
    assert torch.equal(checkpoint.read("e.gate_up_proj"), meant)
    for axis, ranges in ((0, ((1, 2),)), (1, ((1, 5), (7, 10))), (2, ((3, 9),))):
        assert torch.equal(checkpoint.read("e.gate_up_proj", Slice(axis, ranges)), Slice(axis, ranges).of(meant))


def test_experts_of_w4afp8(tmp_path: Path) -> None:
    """Signed codes, two a byte, the lower half first; the largest static scale holds the inputs of all."""
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(6, 16)[:, torch.randperm(256)]
    pairs = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
    scales = torch.rand(6, 2)
    held = {"m.experts.3.up_proj.weight": pairs, "m.experts.3.up_proj.weight_scale_inv": scales}
    held |= {"m.experts.3.up_proj.input_scale": torch.tensor([0.5, 2.0]).bfloat16()}
    held |= {"m.o_proj.weight": CODES, "m.o_proj.weight_scale_inv": torch.rand(3, 2)}
    checkpoint = write(tmp_path / "a.safetensors", held, {"quant_method": "w4afp8", "weight_block_size": [4, 8]})
    meant = codes.float() * scales.repeat_interleave(128, 1)
    assert torch.equal(checkpoint.read("m.experts.3.up_proj.weight"), meant)
    where = Slice(1, ((3, 70), (127, 129)))
    assert torch.equal(checkpoint.read("m.experts.3.up_proj.weight", where), where.of(meant))
    found = checkpoint.spec("m.experts.3.up_proj.weight")
    assert found is not None
    assert found.input_scale == 2
    assert checkpoint.tensors["m.o_proj.weight"].kind == "F8_E4M3"


def test_the_scale_of_a_matrix_divides_in_one_format_of_nvfp4_and_multiplies_in_another(tmp_path: Path) -> None:
    packed = torch.randint(0, 256, (6, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scales = torch.rand(6, 2).to(torch.float8_e4m3fn)
    codes = MicroscaledCodes(packed.view(6, 2, 8), torch.ones(6, 2)).dequantize().view(6, 2, 16)
    divided = write(
        tmp_path / "a.safetensors",
        {"m.weight_packed": packed, "m.weight_scale": scales, "m.weight_global_scale": torch.tensor([8.0])},
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
    )
    multiplied = write(
        tmp_path / "b.safetensors",
        {"m.weight": packed, "m.weight_scale": scales, "m.weight_scale_2": torch.tensor(8.0), "m.input_scale": torch.ones(1)},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    )
    assert torch.equal(divided.read("m.weight"), (codes * (scales.float() / 8)[..., None]).view(6, 32))
    assert torch.equal(multiplied.read("m.weight"), (codes * (scales.float() * 8)[..., None]).view(6, 32))
    held = divided.codes("m.weight")
    assert held is not None
    cut = Cut("inputs", 16, 32, 32)
    assert torch.equal(held.cut(cut).dequantize(), cut.of(divided.read("m.weight")))


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"g": group}}


@pytest.mark.parametrize(
    ("stored", "scheme", "message"),
    [
        ({"weight": CODES}, STATIC, "m.weight_scale_inv is missing: quant_method fp8 means m as e4m3, a scale for each tensor"),
        (
            {"weight": CODES},
            STATIC | {"ignored_layers": ["m"]},
            r"m\.weight \(F8_E4M3\) is part of a quantised matrix, but ignored_layers 'm': m is stored as floats",
        ),
        ({"weight_scale": EACH}, STATIC, r"m\.weight is missing"),
        ({"weight": CODES, "weight_scale": EACH[:5]}, STATIC, r"m\.weight_scale is of the shape \[5\], not \[12, 1\]"),
        ({"weight": CODES, "weight_scale": EACH.int()}, STATIC, r"m\.weight_scale is stored as I32, not as F32 or"),
        ({"weight": CODES.view(torch.int8), "weight_scale": EACH}, STATIC, r"m\.weight is stored as I8, not as F8_E4M3"),
        ({"weight": EACH, "weight_scale": EACH}, STATIC, r"m\.weight is stored as F32, but m\.weight_scale is beside it"),
        ({"weight": CODES.view(-1), "weight_scale": EACH}, STATIC, r"m\.weight is of the shape \[192\], which is no matrix"),
        (
            {"weight": CODES, "weight_scale": EACH, "weight_scale_inv": EACH},
            STATIC,
            r"m\.weight_scale is no part of the matrix",
        ),
        (
            {"weight": CODES.view(torch.int8), "weight_scale": EACH[:4].view(2, 2)},
            compressed("int-quantized", num_bits=8, type="int", strategy="block", block_structure=[6, 8]),
            r"m\.weight is of the shape \[12, 16\]: integers with tiles, and stacks of them, are not read",
        ),
        (
            {"weight_packed": torch.zeros(12, 2).int(), "weight_scale": EACH, "weight_shape": torch.tensor([12, 17])},
            compressed("pack-quantized", num_bits=4, type="int", strategy="channel"),
            r"m\.weight_shape is \[12, 17\], and weight_packed \[12, 2\]",
        ),
        (
            {"weight_packed": torch.zeros(12, 20, dtype=torch.uint8), "weight_scale": torch.zeros(12, 1, dtype=torch.uint8)},
            compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
            r"m\.weight_packed has 40 inputs, which blocks of 32 do not divide",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    stored: dict[str, torch.Tensor], scheme: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        write(tmp_path / "a.safetensors", {f"m.{leaf}": tensor.clone() for leaf, tensor in stored.items()}, scheme)


def test_zero_points_of_small_floats_are_refused(tmp_path: Path) -> None:
    held = {"m.weight": CODES, "m.weight_scale": EACH, "m.weight_zero_point": torch.ones(12)}
    with pytest.raises(ConfigError, match="e4m3 has no zero points"):
        write(tmp_path / "a.safetensors", held, STATIC).read("m.weight")


def test_floats_are_read_whatever_the_patterns_say(tmp_path: Path) -> None:
    """An entry of ``ignore`` that matches nothing, since a prefix was renamed, does no harm."""
    held = {"model.m.weight": torch.rand(4, 8), "model.norm.weight": torch.ones(4)}
    checkpoint = write(tmp_path / "a.safetensors", held, FP8 | {"ignored_layers": ["language_model.m"]})
    assert torch.equal(checkpoint.read("model.m.weight"), held["model.m.weight"])
    assert checkpoint.spec("model.m.weight") is None
