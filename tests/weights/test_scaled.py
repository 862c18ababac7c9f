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
from headrace.quant.float_codes import MicroscaledCodes, TileCodes
from headrace.quant.formats.find import find_scheme
from headrace.weights.load import load_weights
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
