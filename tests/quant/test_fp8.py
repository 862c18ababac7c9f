"""Weights in FP8: what a layer holds, how it multiplies, and what is kept of checkpoints."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels import support
from headrace.kernels.linear.fp8_reference import quantize_rows_ref
from headrace.layers.linear import Linear
from headrace.layers.stored import StoredMatrix
from headrace.parallel.shards import Cut
from headrace.quant.convert import Conversion, Converter
from headrace.quant.float_codes import TileCodes
from headrace.quant.fp8 import Fp8BlockMethod, Fp8HalfBlockMethod, Fp8Method
from headrace.quant.groups import relative_error
from headrace.quant.registry import find

from .packing import layer_of

METHODS = {"outputs": Fp8Method, "blocks": Fp8BlockMethod, "halves": Fp8HalfBlockMethod}


def floats(outputs: int, inputs: int = 256, seed: int = 0) -> torch.Tensor:
    return 0.05 * torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed))


def matrix(weight: torch.Tensor) -> StoredMatrix:
    return StoredMatrix("BF16", lambda: weight.bfloat16())


def convert(quantization: str, layer: Linear, parts: list[StoredMatrix]) -> Conversion:
    # A CPU has kernels of its own for what is stored.
    return Converter(torch.device("cpu"), find(quantization, "cuda")).convert("x", layer, parts)


def tiles(outputs: int, inputs: int, tile: tuple[int, int], seed: int = 0) -> StoredMatrix:
    generator = torch.Generator().manual_seed(seed)
    values = (floats(outputs, inputs, seed) * 2000).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-outputs // tile[0]), -(-inputs // tile[1]), generator=generator) * 1e-3
    codes = TileCodes(values, scales, tile)
    return StoredMatrix("F8_E4M3", codes.dequantize, lambda: codes)


def cut(stored: StoredMatrix, start: int, stop: int) -> StoredMatrix:
    return stored.cut(Cut("outputs", start, stop, len(stored.read())))


@pytest.mark.parametrize("name", METHODS)
def test_floats_are_rounded_and_the_error_is_reported(name: str) -> None:
    parts, method = [matrix(floats(256)), matrix(floats(144, seed=1))], METHODS[name]()
    layer = Linear(256, 400, dtype=torch.bfloat16, device="cpu")
    method.allocate(layer, torch.bfloat16, "cpu")
    error = method.load(layer, parts)
    exact = torch.cat([part.read() for part in parts]).float()
    assert error == pytest.approx(relative_error(method.dequantize(layer), exact), rel=1e-3)
    assert 0.01 < error < 0.04
    assert "weight" not in dict(layer.named_parameters())
    (line,) = method.memory(layer)
    assert line.nbytes < 1.02 * exact.numel() + 4 * 400 + 8


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_activations_are_rounded_alike_whatever_is_beside_them(name: str, bias: bool) -> None:
    method = METHODS[name]()
    more = torch.randn(144) if bias else None
    layer = layer_of(method, [matrix(floats(144))], more, torch.bfloat16)
    x = torch.randn(17, 256).bfloat16()
    x[3] *= 100
    codes, scales = quantize_rows_ref(x, 256 if name == "outputs" else 128)
    rounded = codes.double() * scales.double().repeat_interleave(256 // scales.shape[1], 1)
    expected = rounded @ method.dequantize(layer).double().t() + (0 if layer.bias is None else layer.bias.double())
    torch.testing.assert_close(layer(x).double(), expected, rtol=2.0**-7, atol=1e-3)
    torch.testing.assert_close(layer(x[3:4]), layer(x)[3:4], rtol=1e-2, atol=1e-3)
    assert layer(x.view(17, 1, 256)).shape == (17, 1, 144)
    layer.out_dtype = torch.float32
    assert layer(x).dtype == torch.float32


CASES = {
    "blocks": ([tiles(256, 256, (128, 128)), tiles(128, 256, (128, 128), 1)], Fp8BlockMethod),
    "blocks and part of one": ([tiles(256, 256, (128, 128)), tiles(80, 256, (128, 128), 1)], Fp8BlockMethod),
    "halves of blocks": ([tiles(128, 256, (128, 128)), tiles(144, 256, (64, 128), 1)], Fp8HalfBlockMethod),
    "blocks, and parts of one and a half": ([tiles(192, 256, (128, 128)), tiles(144, 256, (128, 128), 1)], Fp8HalfBlockMethod),
    "tiles of outputs that a cut splits": ([cut(tiles(144, 256, (48, 256)), 64, 144)], Fp8Method),
    "a part that begins within a block": ([cut(tiles(320, 256, (128, 128)), 64, 320)], Fp8HalfBlockMethod),
    "a scale for each output": ([tiles(48, 256, (1, 256)), tiles(16, 256, (1, 256), 1)], Fp8Method),
    "a scale for each matrix": ([tiles(48, 256, (48, 256)), tiles(16, 256, (16, 256), 1)], Fp8Method),
    "scales of both kinds": ([tiles(48, 256, (48, 256)), tiles(16, 256, (1, 256), 1)], Fp8Method),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("online", ["fp8", "fp8_per_block", "stored"])
def test_codes_are_kept(name: str, online: str) -> None:
    parts, kind = CASES[name]
    exact = torch.cat([part.read() for part in parts])
    layer = Linear(256, len(exact), dtype=torch.bfloat16, device="cpu")
    done = convert(online, layer, parts)
    assert type(layer.method) is kind and done.error == 0 and "kept" in done.reason
    assert torch.equal(layer.method.dequantize(layer), exact)


MISFITS = {
    "other tiles": ([tiles(64, 256, (64, 64))], "FP8 with such scales"),
    "part of a block before blocks": (
        [tiles(48, 256, (128, 128)), tiles(192, 256, (128, 128), 1)],
        "FP8 with such scales",
    ),
    "codes beside floats": ([tiles(128, 256, (128, 128)), matrix(floats(128))], "not all of it has codes"),
    "outputs that are no multiple": ([tiles(24, 256, (1, 256))], "24 outputs are not a multiple of 16"),
    "floats": ([matrix(floats(64))], "which is kept"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_no_kernel_multiplies_stays_floats(name: str) -> None:
    parts, reason = MISFITS[name]
    exact = torch.cat([part.read() for part in parts])
    layer = Linear(256, len(exact), dtype=torch.float32, device="cpu")
    done = convert("stored", layer, parts)
    assert done.format == "floats" and reason in done.reason
    assert torch.equal(layer.weight, exact)


def test_a_stored_block_that_would_be_split_is_rounded_again() -> None:
    parts = [matrix(floats(64)), tiles(128, 256, (128, 128)), matrix(floats(64, seed=1))]
    exact = torch.cat([part.exact().float() for part in parts])
    layer = Linear(256, len(exact), dtype=torch.bfloat16, device="cpu")
    done = convert("fp8_per_block", layer, parts)
    assert type(layer.method) is Fp8BlockMethod and 0.01 < done.error < 0.04
    assert relative_error(layer.method.dequantize(layer), exact) < 0.04


@pytest.mark.parametrize(("name", "kind"), [("fp8", Fp8Method), ("fp8_per_block", Fp8BlockMethod)])
def test_codes_of_another_kind_are_rounded_beside_floats(name: str, kind: type[Fp8Method]) -> None:
    """A fused matrix has parts of which one is stored in blocks, one with a scale for each output, and one as floats."""
    parts = [tiles(128, 256, (128, 128)), tiles(128, 256, (1, 256), 1), matrix(floats(128))]
    exact = torch.cat([part.exact().float() for part in parts])
    layer = Linear(256, len(exact), dtype=torch.bfloat16, device="cpu")
    done = convert(name, layer, parts)
    assert type(layer.method) is kind and 0 < done.error < 0.04
    held = layer.method.dequantize(layer)
    assert relative_error(held, exact) < 0.04
    kept = slice(128) if kind is Fp8BlockMethod else slice(128, 256)
    assert torch.equal(held[kept], exact[kept])


def test_blocks_are_asked_for_where_they_fit() -> None:
    layer = Linear(192, 256, dtype=torch.bfloat16, device="cpu")
    done = convert("fp8_per_block", layer, [matrix(floats(256, 192))])
    assert done.format == "floats" and "192 inputs are not a multiple of 128" in done.reason


def test_blocks_are_multiplied_on_hopper_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, misfits in ((89, True), (90, False), (100, True)):
        monkeypatch.setattr(support, "compute_capability", lambda _, found=capability: found)
        assert any("Hopper" in reason for reason in Fp8BlockMethod.supports(256, 256, "cuda")) == misfits
        assert not Fp8Method.supports(256, 256, "cuda")
