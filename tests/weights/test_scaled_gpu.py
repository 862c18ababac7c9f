"""A GPU makes the same floats and codes of quantised matrices as a CPU, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.models.packers import Rounded, words

from headrace.quant.formats.find import find_scheme
from headrace.weights.names import Slice
from headrace.weights.safetensors import SafetensorsCheckpoint
from headrace.weights.scaled import ScaledCheckpoint

from .models import config

pytestmark = pytest.mark.gpu

ORDER = torch.randperm(192, generator=torch.Generator().manual_seed(1)) // 64
SMALL_FLOATS = torch.arange(96 * 192).remainder(120).to(torch.uint8).view(96, 192).view(torch.float8_e4m3fn)
PAIRS = torch.arange(96 * 96).remainder(251).to(torch.uint8).view(96, 96)
EXPONENTS = torch.arange(12).add(120).to(torch.uint8).view(3, 4)


def formats() -> dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]]:
    """(quantization_config, stored tensors) of a matrix ``[96, 192]``."""
    made, wide = Rounded(96, 192), Rounded(96, 192, bits=8, group=192)
    ordered = Rounded(96, 192, group=64, order=ORDER)
    ints = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
    packed = {"targets": ["Linear"], "weights": ints}
    floats = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    library = {"quant_method": "compressed-tensors"}
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
    return {
        "gptq": (gptq, made.gptq()),
        "gptq-8": (gptq | {"bits": 8, "group_size": -1}, wide.gptq()),
        "act-order": (gptq | {"group_size": 64}, ordered.gptq()),
        "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32}, made.awq()),
        "packed": (
            library | {"format": "pack-quantized", "config_groups": {"g": packed}},
            {
                "weight_packed": words(made.codes, 4),
                "weight_scale": made.scales,
                "weight_zero_point": words(made.zeros.T, 4).T.contiguous(),
                "weight_shape": torch.tensor([96, 192]),
            },
        ),
        "nvfp4": (
            library | {"format": "nvfp4-pack-quantized", "config_groups": {"g": {"targets": ["Linear"], "weights": floats}}},
            {
                "weight_packed": PAIRS,
                "weight_scale": SMALL_FLOATS[:, :12].contiguous(),
                "weight_global_scale": torch.tensor([7.0]),
            },
        ),
        "tiles": (
            {"quant_method": "fp8", "weight_block_size": [40, 48]},
            {"weight": SMALL_FLOATS, "weight_scale_inv": torch.rand(3, 4)},
        ),
        "exponents": (
            {"quant_method": "fp8", "weight_block_size": [40, 48], "scale_fmt": "ue8m0"},
            {"weight": SMALL_FLOATS, "weight_scale_inv": EXPONENTS.view(torch.float8_e8m0fnu)},
        ),
        "channel": ({"quant_method": "fbgemm_fp8"}, {"weight": SMALL_FLOATS, "weight_scale": torch.rand(96, 1)}),
        "tensor": ({"quant_method": "fp8"}, {"weight": SMALL_FLOATS, "weight_scale": torch.tensor(0.3)}),
    }


@pytest.mark.parametrize("name", formats())
def test_a_gpu_reads_what_a_cpu_reads(name: str, tmp_path: Path) -> None:
    scheme, stored = formats()[name]
    save_file({f"model.m.{leaf}": tensor for leaf, tensor in stored.items()}, tmp_path / "model.safetensors")

    def opened(device: str) -> ScaledCheckpoint:
        inner = SafetensorsCheckpoint([tmp_path / "model.safetensors"])
        return ScaledCheckpoint(inner, find_scheme(config(quantization_config=scheme)), device)

    here, there = opened("cpu"), opened("cuda")
    for where in (None, Slice(0, ((3, 50),)), Slice(1, ((0, 40), (65, 131)))):
        found = there.read("model.m.weight", where)
        assert found.is_cuda
        assert torch.equal(found.cpu(), here.read("model.m.weight", where))
    codes, expected = there.codes("model.m.weight"), here.codes("model.m.weight")
    assert codes is not None
    assert expected is not None
    assert torch.equal(codes.dequantize().cpu(), expected.dequantize())
