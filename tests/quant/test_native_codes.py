"""Checkpoints' own codes in the native kernels: nothing is lost, and products are those of the dequantised weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.resolving import ZEN
from torch.nn.functional import linear

from headrace.kernels.native import NativeKernels, load
from headrace.layers.linear import Linear
from headrace.layers.stored import Codes, StoredMatrix
from headrace.parallel.shards import Cut
from headrace.quant.convert import Conversion, Converter
from headrace.quant.float_codes import MicroscaledCodes, TileCodes
from headrace.quant.formats.find import find_scheme
from headrace.quant.groups import GroupCodes, relative_error
from headrace.quant.integers import KeepNative
from headrace.quant.native import NativeFp8Method, NativeMethod
from headrace.quant.registry import STORED, STORED_INT4, automatic, find
from headrace.resolve.facts import DeviceFacts

from .packing import layer_of
from .test_registry import NATIVE, facts

INPUTS = 256
ROWS = (1, 2, 3, 4, 5, 16, 33, 200)
ERROR = {torch.float32: 1e-4, torch.bfloat16: 4e-3}
"""Dtype of the activations -> error of a product; integers meet activations of 15 bits."""


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def integers(bits: int, group: int, dtype: torch.dtype = torch.float16, outputs: int = 72, seed: int = 0) -> GroupCodes:
    """Codes with zero points, as GPTQ and AWQ have them."""
    count = INPUTS // group
    codes = torch.randint(0, 2**bits, (outputs, INPUTS), dtype=torch.uint8, generator=draw(seed))
    scales = (0.001 + 0.01 * torch.rand(outputs, count, generator=draw(seed + 1))).to(dtype)
    zeros = torch.randint(0, 2**bits, (outputs, count), dtype=torch.uint8, generator=draw(seed + 2))
    return GroupCodes(bits, codes, scales, zeros, group)


def reordered(codes: GroupCodes, seed: int = 5) -> GroupCodes:
    groups = torch.arange(INPUTS) // codes.group
    return dataclasses.replace(codes, order=groups[torch.randperm(INPUTS, generator=draw(seed))])


def fp8(tile: tuple[int, int], outputs: int = 72, first: tuple[int, int] = (0, 0)) -> TileCodes:
    values = torch.randn(outputs, INPUTS, generator=draw()).to(torch.float8_e4m3fn)
    counts = [-(-(size + start) // each) for size, start, each in zip((outputs, INPUTS), first, tile, strict=True)]
    return TileCodes(values, 0.001 + 0.01 * torch.rand(*counts, generator=draw(1)), tile, first)


def matrix(codes: Codes, kind: str = "codes") -> StoredMatrix:
    return StoredMatrix(kind, codes.dequantize, lambda: codes)


INTEGERS = {
    **{f"{bits} bits, groups of {group}": integers(bits, group) for bits in (4, 8) for group in (32, 64, 128, INPUTS)},
    "bfloat16 scales": integers(4, 128, torch.bfloat16),
    "float32 scales": integers(4, 128, torch.float32),
    "large scales": dataclasses.replace(integers(8, 64), scales=1e5 * torch.rand(72, 4, generator=draw())),
    "another order": reordered(integers(4, 128)),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_are_held_exactly(kernels: NativeKernels, name: str) -> None:
    codes = INTEGERS[name]
    layer = layer_of(NativeMethod(kernels, codes.bits), [matrix(codes)])
    held, exact = layer.method.dequantize(layer), codes.dequantize()
    assert torch.equal(held, exact)
    assert layer.method.load(layer, [matrix(codes)]) == 0.0
    for dtype, most in ERROR.items():
        for rows in ROWS:
            x = torch.randn(rows, INPUTS, generator=draw(rows)).to(dtype)
            expected = linear(x.double(), exact.double())
            if dtype == torch.bfloat16 and kernels.wide_rows and rows >= kernels.wide_rows:
                expected = linear(x.double(), exact.bfloat16().double())
            assert relative_error(layer(x), expected) < most


def test_zero_points_take_no_more_room_than_minima(kernels: NativeKernels) -> None:
    sizes = {}
    for dtype in (torch.float16, torch.float32):
        layer = layer_of(NativeMethod(kernels, 4), [matrix(integers(4, 128, dtype, outputs=64))])
        (line,) = layer.memory()
        sizes[dtype] = line.nbytes * 8 / 64 / INPUTS
    assert sizes == {torch.float16: 5.0, torch.float32: 6.0}


def test_parts_in_one_order_are_fused(kernels: NativeKernels) -> None:
    """All parts of a fused matrix have the same inputs; where their orders differ, no product has them all."""
    first, second = reordered(integers(4, 64)), reordered(integers(8, 64, seed=7))
    layer = layer_of(NativeMethod(kernels, 8), [matrix(first), matrix(second)])
    exact = torch.cat((first.dequantize(), second.dequantize()))
    assert torch.equal(layer.method.dequantize(layer), exact)
    assert relative_error(layer(torch.eye(INPUTS)), exact.T) < 1e-4
    other = reordered(integers(4, 64), seed=8)
    done = converted([matrix(first), matrix(other)])
    assert done.format == "floats" and "several orders" in done.reason


def converted(parts: list[StoredMatrix], layer: Linear | None = None) -> Conversion:
    layer = layer or Linear(INPUTS, sum(len(part.read()) for part in parts), dtype=torch.float32, device="cpu")
    return Converter(torch.device("cpu"), find(STORED, "cpu")).convert("x", layer, parts)


TILES = {
    "blocks": fp8((128, 128)),
    "a scale for each output": fp8((1, INPUTS)),
    "a scale for the matrix": fp8((72, INPUTS)),
    "small tiles": fp8((24, 32)),
    "a cut block": fp8((128, 128), first=(40, 64)),
}


@pytest.mark.parametrize("name", TILES)
def test_fp8_is_held_exactly(kernels: NativeKernels, name: str) -> None:
    codes = TILES[name]
    layer = layer_of(NativeFp8Method(kernels), [matrix(codes), matrix(codes.cut(Cut("outputs", 5, 13, 72)))])
    exact = torch.cat((codes.dequantize(), codes.dequantize()[5:13]))
    torch.testing.assert_close(layer.method.dequantize(layer), exact, rtol=0, atol=0)
    for dtype, most in {torch.float32: 1e-6, torch.bfloat16: 4e-3}.items():
        x = torch.randn(300, INPUTS, generator=draw(9)).to(dtype)
        whole = layer(x)
        assert relative_error(whole, linear(x.double(), exact.double())) < most
        for begin, end in ((0, 1), (3, 5), (7, 135), (290, 300)):
            assert torch.equal(layer(x[begin:end]), whole[begin:end])


def test_every_code_of_fp8(kernels: NativeKernels) -> None:
    """Subnormal numbers and both zeros included; the two codes of NaN are refused."""
    values = torch.arange(256, dtype=torch.uint8)
    values[(values & 127) == 127] = 0
    codes = TileCodes(values.view(torch.float8_e4m3fn).view(1, 256), torch.full((1, 1), 0.5), (1, 256))
    layer = layer_of(NativeFp8Method(kernels), [matrix(codes)], torch.tensor([3.0]))
    assert torch.equal(layer(torch.eye(256)).flatten(), codes.dequantize().flatten() + 3)
    nan = dataclasses.replace(codes, values=torch.full((1, 256), 127, dtype=torch.uint8).view(torch.float8_e4m3fn))
    with pytest.raises(OverflowError, match="no number"):
        layer_of(NativeFp8Method(kernels), [matrix(nan)])


def test_mxfp4_is_held_as_integers(kernels: NativeKernels) -> None:
    blocks = torch.randint(0, 256, (40, 8, 16), dtype=torch.uint8, generator=draw())
    scales = torch.randint(90, 132, (40, 8), dtype=torch.uint8, generator=draw(1))
    codes = MicroscaledCodes(blocks, scales)
    layer = layer_of(NativeMethod(kernels, 8), [matrix(codes)])
    assert torch.equal(layer.method.dequantize(layer), codes.dequantize().float())
    assert MicroscaledCodes(blocks, torch.full_like(scales, 255)).integers() is None


def test_nvfp4_as_integers() -> None:
    """Blocks of 16, which kernels of GPUs hold."""
    blocks = torch.randint(0, 256, (24, 8, 8), dtype=torch.uint8, generator=draw())
    codes = MicroscaledCodes(blocks, torch.rand(24, 8, generator=draw()) / 100)
    held = codes.integers()
    assert held is not None and held.group == 16 and held.bits == 8
    assert torch.equal(held.dequantize(), codes.dequantize())
    stacked = MicroscaledCodes(blocks[None], codes.scales[None])
    assert stacked.integers() is None


@pytest.fixture
def need_native() -> None:
    found = load()
    if found is None or found.tile == "portable":
        pytest.skip("no native products here")


CASES: dict[str, tuple[Callable[[], list[StoredMatrix]], str, str]] = {
    "integers": (lambda: [matrix(integers(4, 128))], "4 bits", "numbers are kept"),
    "integers of two widths": (lambda: [matrix(integers(4, 128)), matrix(integers(8, 32))], "8 bits", "numbers are kept"),
    "FP8": (lambda: [matrix(fp8((128, 128)))], "e4m3", "numbers are kept"),
    "FP8 beside integers": (lambda: [matrix(fp8((128, 128))), matrix(integers(4, 32))], "floats", "do not hold"),
    "tiles of 48": (lambda: [matrix(fp8((48, 48)))], "floats", "groups of 32"),
    "floats beside codes": (
        lambda: [matrix(integers(4, 32)), StoredMatrix("BF16", lambda: torch.zeros(8, INPUTS))],
        "floats",
        "not all of it has codes",
    ),
    "floats": (lambda: [StoredMatrix("BF16", lambda: torch.zeros(8, INPUTS))], "floats", "which is kept"),
}


@pytest.mark.usefixtures("need_native")
@pytest.mark.parametrize("name", CASES)
def test_what_is_kept(name: str) -> None:
    made, format, reason = CASES[name]
    parts = made()
    layer = Linear(INPUTS, sum(len(part.read()) for part in parts), dtype=torch.float32, device="cpu")
    done = converted(parts, layer)
    assert done.format.startswith(format) and reason in done.reason and done.error == 0
    assert torch.equal(layer.method.dequantize(layer), torch.cat([part.read() for part in parts]))


def test_without_native_kernels_codes_become_floats() -> None:
    keep = KeepNative(lambda: None)
    quantization = dataclasses.replace(find(STORED, "cpu"), candidates=(keep,))
    layer = Linear(INPUTS, 72, dtype=torch.float32, device="cpu")
    done = Converter(torch.device("cpu"), quantization).convert("x", layer, [matrix(integers(4, 128))])
    assert done.format == "floats" and "dequantised" in done.reason


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
NVFP4 = {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "group_size": 16}}


@pytest.mark.parametrize(
    ("scheme", "device", "dtype", "asked", "name", "why"),
    [
        (GPTQ, NATIVE, "bfloat16", False, STORED_INT4, "which the CPU multiplies"),
        (GPTQ, NATIVE, "float32", False, STORED_INT4, "which the CPU multiplies"),
        (FP8, NATIVE, "bfloat16", False, STORED, "which the CPU multiplies"),
        (GPTQ, NATIVE, "float32", True, "none", "for exact results"),
        (GPTQ, ZEN, "bfloat16", False, "none", "native kernels are not available"),
        (NVFP4, NATIVE, "bfloat16", False, "none", "not of integers, MXFP4 or FP8"),
    ],
)
def test_a_cpu_keeps_what_a_checkpoint_has(
    scheme: dict[str, Any], device: DeviceFacts, dtype: str, asked: bool, name: str, why: str
) -> None:
    found = find_scheme(SimpleNamespace(quantization_config=scheme))
    chosen, reason = automatic(facts(device, dtype=dtype, asked_dtype=asked), None, found)
    assert chosen == name and why in reason
