"""The packed products against the product with the weights that they hold."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from headrace.kernels.native import NativeKernels, load
from headrace.layers.linear import Linear
from headrace.quant import int4, native
from headrace.quant.groups import GroupCodes, relative_error, round_to_groups
from headrace.quant.hybrid import HybridMethod
from headrace.quant.int4 import Int4Method
from headrace.quant.int8 import Int8Method
from headrace.quant.native import NativeMethod

from .conftest import compiled_for
from .packing import layer_of

FLOATS = [torch.float32, torch.bfloat16]
ACTIVATION_ERROR = 1e-4
"""Error of a product with activations rounded to 15 bits by groups of 32, against the exact one, with normal activations."""


def weights(bits: int, rows: int, columns: int, seed: int = 0) -> GroupCodes:
    generator = torch.Generator().manual_seed(seed)
    return round_to_groups(0.02 * torch.randn(rows, columns, generator=generator), bits, torch.float16)


def inputs(rows: int, columns: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def native_layer(given: GroupCodes, bias: torch.Tensor | None, kernels: NativeKernels) -> Linear:
    return layer_of(NativeMethod(kernels, given.bits), given, bias)


def dequantized(layer: Linear) -> torch.Tensor:
    return layer.method.dequantize(layer)


# The native product


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("outputs", "columns"), [(16, 32), (40, 64), (7, 96), (960, 576)])
def test_native_holds_what_it_was_given(kernels: NativeKernels, bits: int, outputs: int, columns: int) -> None:
    given = weights(bits, outputs, columns)
    module = native_layer(given, None, kernels)
    assert torch.equal(dequantized(module), native.held(given).dequantize())
    (line,) = module.method.memory(module)
    assert line.nbytes == -(-outputs // 16) * columns // 32 * (64 + 64 * bits)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_native_product(kernels: NativeKernels, bits: int, dtype: torch.dtype) -> None:
    outputs, columns = 200, 576
    bias = torch.randn(outputs)
    for add in (None, bias):
        module = native_layer(weights(bits, outputs, columns), add, kernels)
        exact = dequantized(module)
        for rows in (1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 33, 300):
            x = inputs(rows, columns, dtype)
            y = module(x)
            assert y.dtype == dtype
            assert y.shape == (rows, outputs)
            expected = linear(x.float(), exact) + (0 if add is None else add)
            assert relative_error(y, expected) < ACTIVATION_ERROR + (4e-3 if dtype == torch.bfloat16 else 0)
            if kernels.wide_rows and rows >= kernels.wide_rows and dtype == torch.bfloat16 and add is None:
                # Weights rounded to bfloat16, and nothing else but the result.
                assert relative_error(y, linear(x.float(), exact.bfloat16().float())) < 2e-3


@pytest.mark.parametrize("bits", [4, 8])
def test_native_is_exact_for_activations_of_fifteen_bits(kernels: NativeKernels, bits: int) -> None:
    """Integers up to 16256 with 16256 in each group lose nothing: what is left is float32's own rounding."""
    x = torch.randint(-16256, 16257, (9, 128), generator=torch.Generator().manual_seed(0)).float()
    x[:, ::32] = 16256
    module = native_layer(weights(bits, 48, 128), None, kernels)
    expected = linear(x.double(), dequantized(module).double())
    torch.testing.assert_close(module(x).double(), expected, rtol=1e-5, atol=0.1)


@pytest.mark.parametrize("bits", [4, 8])
def test_vector_units_agree(bits: int) -> None:
    """Bit for bit: the integers are exact, and floats are added in the same order."""
    module = native_layer(weights(bits, 80, 160), None, compiled_for("native"))
    if compiled_for("native").tile == "portable":
        pytest.skip("no vector units that have a tile here")
    other = native_layer(weights(bits, 80, 160), None, compiled_for("x86-64-v3"))
    for rows in (1, 2, 3, 4, 6, 11, 200):
        x = inputs(rows, 160, torch.float32)
        assert torch.equal(module(x), other(x))


@pytest.mark.parametrize("bits", [4, 8])
def test_native_keeps_small_activations_beside_a_large_one(kernels: NativeKernels, bits: int) -> None:
    """Language models have channels a thousand times larger than their neighbours, which must not drown."""
    x = inputs(5, 64, torch.float32)
    x[:, 7] = 500.0
    given = weights(bits, 48, 64)
    given.codes.view(48, 64)[:, 7], given.mins[:, 0] = 0, 0.0
    module = native_layer(given, None, kernels)
    assert relative_error(module(x), linear(x, dequantized(module))) < 0.02


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("bits", [4, 8])
def test_native_with_the_largest_codes(kernels: NativeKernels, bits: int, rows: int) -> None:
    """No intermediate sum overflows, of few rows or many."""
    top = 2**bits - 1
    ones = torch.ones(16, 2)
    module = native_layer(GroupCodes(bits, torch.full((16, 64), top, dtype=torch.uint8), ones, -3 * ones), None, kernels)
    for sign in (1.0, -1.0):
        x = torch.full((rows, 64), sign * 5.0)
        torch.testing.assert_close(module(x), torch.full((rows, 16), sign * 5.0 * 64 * (top - 3)), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_does_not_depend_on_its_neighbours(kernels: NativeKernels, bits: int, dtype: torch.dtype) -> None:
    """Bit for bit, so batching and chunking change nothing: among few rows, and among many in bfloat16."""
    module = native_layer(weights(bits, 80, 96), None, kernels)
    x = inputs(700, 96, dtype)
    border = kernels.wide_rows if dtype == torch.bfloat16 and kernels.wide_rows else len(x)
    few, many = module(x[: border - 1]), module(x)
    for begin, end in ((0, 1), (5, 8), (17, 33), (2, 61)):
        assert torch.equal(module(x[begin:end]), few[begin:end])
    for begin, end in ((0, 64), (100, 399), (255, 700), (13, 90)):
        assert torch.equal(module(x[begin:end]), many[begin:end])


def test_native_shapes_and_dtypes(kernels: NativeKernels) -> None:
    module = native_layer(weights(4, 48, 64), None, kernels)
    x = inputs(6, 64, torch.float32)
    assert torch.equal(module(x.view(2, 3, 64)), module(x).view(2, 3, 48))
    wide = inputs(6, 200, torch.float32)
    assert torch.equal(module(wide[:, 64:128]), module(wide[:, 64:128].contiguous()))
    assert torch.equal(module(x.T.contiguous().T), module(x))
    assert module(x[:0]).shape == (0, 48)
    half = module(x.half())
    assert half.dtype == torch.float16
    assert relative_error(half, module(x)) < 5e-3
    module.out_dtype = torch.float32
    assert module(x.bfloat16()).dtype == torch.float32
    assert module(x.half()).dtype == torch.float32


def test_native_with_zeros_and_extremes(kernels: NativeKernels) -> None:
    module = native_layer(weights(4, 16, 64), None, kernels)
    assert (module(torch.zeros(3, 64)) == 0).all()
    x = torch.zeros(1, 64)
    x[0, 5] = 1e20
    torch.testing.assert_close(module(x), 1e20 * dequantized(module)[:, 5][None], rtol=1e-3, atol=1e15)


# PyTorch's own


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_int4(rows: int, dtype: torch.dtype) -> None:
    given, bias = weights(4, 48, 96), torch.randn(48).to(dtype)
    module = layer_of(Int4Method(), given, bias, dtype)
    held = int4.held(given, dtype).dequantize()
    assert relative_error(dequantized(module), held) < 1e-6
    x = inputs(rows, 96, dtype)
    assert relative_error(module(x), linear(x.float(), held, bias.float())) < (1e-5 if dtype == torch.float32 else 8e-3)
    assert module(x.view(rows, 1, 96)).shape == (rows, 1, 48)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_int8(rows: int, dtype: torch.dtype) -> None:
    weight, bias = torch.randn(40, 48), torch.randn(40).to(dtype)
    weight[3] = 0
    module = layer_of(Int8Method(), weight, bias, dtype)
    assert relative_error(dequantized(module), weight) < 0.01
    x = inputs(rows, 48, dtype)
    expected = linear(x.float(), dequantized(module), bias.float())
    assert relative_error(module(x), expected) < (1e-5 if dtype == torch.float32 else 8e-3)


def test_what_does_not_fit() -> None:
    assert not Int4Method.supports(64, 32, "cpu")
    assert "20 outputs" in str(Int4Method.supports(64, 20, "cpu"))
    assert "48 inputs" in str(Int4Method.supports(48, 32, "cpu"))
    assert not Int8Method.supports(48, 20, "cpu")
    assert "40 inputs" in str(Int8Method.supports(40, 20, "cpu"))
    assert not NativeMethod.supports(64, 7, "cpu")
    assert "48 inputs" in str(NativeMethod.supports(48, 16, "cpu"))


def test_hybrid_changes_over_at_its_crossover() -> None:
    given = weights(4, 32, 64)
    copy = given.dequantize().bfloat16()
    module = layer_of(HybridMethod(Int4Method(), crossover=4), given, None, torch.bfloat16)
    packed = layer_of(Int4Method(), given, None, torch.bfloat16)
    for rows in (1, 4, 5, 20):
        x = inputs(rows, 64, torch.bfloat16)
        assert torch.equal(module(x), packed(x) if rows <= 4 else linear(x, copy))
    assert torch.equal(module.get_buffer("copy"), copy)
    assert module.method.memory(module)[:1] == packed.method.memory(packed)
    module.out_dtype = torch.float32
    assert {module(inputs(rows, 64, torch.bfloat16)).dtype for rows in (1, 20)} == {torch.float32}


def test_this_machine_runs_one_of_them() -> None:
    """The suite would say nothing of the native product if it were never there."""
    kernels = load()
    if kernels is None:
        pytest.skip("no compiler here")
    assert kernels.tile in ("avx512_vnni", "avx2", "portable")
