"""Formats that matrices get, with native kernels and without, and that the reported error is the true one."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from gguf.quants import dequantize
from support.quant_blocks import Type, random_blocks
from torch.nn.functional import linear

from headrace.errors import ConfigError
from headrace.kernels.native import NativeKernels, load
from headrace.layers.linear import Linear
from headrace.layers.stored import StoredMatrix
from headrace.quant.convert import Converter
from headrace.quant.gguf_blocks import decode
from headrace.quant.groups import relative_error
from headrace.quant.hybrid import HybridMethod
from headrace.quant.int4 import Int4Method
from headrace.quant.int8 import Int8Method
from headrace.quant.integers import AMX_ROWS, INT4_ROWS, INT8_ROWS, NativeIntegers, TorchIntegers
from headrace.quant.native import NativeMethod
from headrace.quant.registry import find

COLUMNS = 256


@pytest.fixture
def vector_kernels() -> NativeKernels:
    found = load()
    if found is None or found.tile == "portable":
        pytest.skip("no native products here")
    return found


def converter(quantization: str, kernels: NativeKernels | None, device: str = "cpu") -> Converter:
    """The CPU's, with these compiled kernels or without."""
    bits = int(quantization.removeprefix("int"))
    candidates = NativeIntegers(bits, lambda: kernels), TorchIntegers(bits)
    return Converter(torch.device(device), dataclasses.replace(find(quantization, "cpu"), candidates=candidates))


def stored(kind: Type, rows: int, seed: int = 0) -> StoredMatrix:
    blocks = random_blocks(kind, rows, COLUMNS, seed)
    return StoredMatrix(kind.name, lambda: torch.from_numpy(dequantize(blocks, kind)), lambda: decode(blocks, kind))


def floats(rows: int, columns: int = COLUMNS, seed: int = 0) -> StoredMatrix:
    weight = 0.02 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return StoredMatrix("BF16", lambda: weight.bfloat16())


def target(pieces: list[StoredMatrix], *, bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> Linear:
    shapes = [tuple(piece.exact().shape) for piece in pieces]
    module = Linear(shapes[0][1], sum(shape[0] for shape in shapes), bias=bias, dtype=dtype, device="cpu")
    if module.bias is not None:
        module.bias.data.normal_()
    return module


def exact(pieces: list[StoredMatrix]) -> torch.Tensor:
    return torch.cat([piece.exact().float() for piece in pieces])


CASES = {
    "Q4_1": ([stored(Type.Q4_1, 32)], 4, True),
    "Q4_0 and Q4_K": ([stored(Type.Q4_0, 32), stored(Type.Q4_K, 16, 1)], 4, False),
    "Q8_0": ([stored(Type.Q8_0, 48)], 8, True),
    "Q5_1": ([stored(Type.Q5_1, 48)], 8, True),
    "Q6_K": ([stored(Type.Q6_K, 48)], 8, False),
    "Q4_K with Q6_K": ([stored(Type.Q4_K, 32), stored(Type.Q4_K, 16, 1), stored(Type.Q6_K, 16, 2)], 8, False),
    "floats": ([floats(32), floats(16, seed=1)], 4, False),
    "floats with Q4_1": ([floats(32), stored(Type.Q4_1, 16)], 4, False),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_native(vector_kernels: NativeKernels, name: str, bias: bool) -> None:
    pieces, bits, is_exact = CASES[name]
    module = target(pieces, bias=bias)
    done = converter("int4", vector_kernels).convert("layers.0.mlp.down_proj", module, pieces)
    method = module.method.packed if isinstance(module.method, HybridMethod) else module.method
    assert isinstance(method, NativeMethod)
    assert method.bits == bits
    held = method.dequantize(module)
    assert done.error == pytest.approx(relative_error(held, exact(pieces)), rel=1e-3, abs=1e-8)
    assert (done.error == 0) == is_exact
    assert done.error < (0.12 if bits == 4 and "floats" in name else 0.01)
    x = torch.randn(3, COLUMNS).bfloat16()
    expected = linear(x.float(), held, None if module.bias is None else module.bias.float())
    assert relative_error(module(x), expected) < 0.01


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_without_native(name: str, bias: bool) -> None:
    pieces, bits, _ = CASES[name]
    module = target(pieces, bias=bias)
    done = converter("int4", None).convert("layers.0.mlp.down_proj", module, pieces)
    method = module.method
    assert isinstance(method, HybridMethod)
    assert isinstance(method.packed, Int4Method if bits == 4 else Int8Method)
    assert method.crossover == (INT4_ROWS if bits == 4 else INT8_ROWS)
    held = method.dequantize(module)
    assert done.error == pytest.approx(relative_error(held, exact(pieces)), rel=1e-3)
    assert 0 < done.error < (0.12 if "floats" in name else 0.02)
    assert torch.equal(module.get_buffer("copy"), exact(pieces).bfloat16())
    for rows, weight in ((1, held), (40, exact(pieces))):
        x = torch.randn(rows, COLUMNS).bfloat16()
        expected = linear(x.float(), weight, None if module.bias is None else module.bias.float())
        assert relative_error(module(x), expected) < 0.01


def test_the_head_keeps_eight_bits(vector_kernels: NativeKernels) -> None:
    pieces = [stored(Type.Q4_1, 32)]
    done = converter("int4", vector_kernels).convert("lm_head", target(pieces), pieces, is_head=True)
    assert "8 bits" in done.format
    assert done.error == 0
    assert "head" in done.reason


def test_int8_widens_what_has_fewer_bits(vector_kernels: NativeKernels) -> None:
    pieces = [stored(Type.Q4_1, 32)]
    done = converter("int8", vector_kernels).convert("x", target(pieces), pieces)
    assert "8 bits" in done.format
    assert done.error == 0
    assert converter("int8", vector_kernels).convert("x", target([floats(32)]), [floats(32)]).error < 0.01


def test_scales_beyond_half_precision_go_elsewhere(vector_kernels: NativeKernels) -> None:
    weight = torch.randn(16, 64) * 1e7
    pieces = [StoredMatrix("F32", lambda: weight)]
    layer = target(pieces)
    done = converter("int4", vector_kernels).convert("x", layer, pieces)
    assert isinstance(layer.method, HybridMethod)
    assert isinstance(layer.method.packed, Int4Method)
    assert done.error < 0.12


def test_scales_that_are_no_number_do_too(vector_kernels: NativeKernels) -> None:
    weight = torch.randn(16, 64)
    weight[3, 5] = torch.nan
    layer = target(pieces := [StoredMatrix("F32", lambda: weight)])
    with pytest.raises(OverflowError, match="or no number"):
        NativeMethod(vector_kernels, 4).load(layer, pieces)


def test_shapes_that_no_kernel_takes(vector_kernels: NativeKernels) -> None:
    for kernels in (vector_kernels, None):
        with pytest.raises(ConfigError, match=r"int4 cannot hold layers\.3\.mlp\.down_proj: 40 inputs") as error:
            converter("int4", kernels).convert("layers.3.mlp.down_proj", target([floats(16, 40)]), [floats(16, 40)])
        assert error.value.param == "quantization"
    with pytest.raises(ConfigError, match="20 outputs"):
        converter("int4", None).convert("x", target([floats(20, 64)]), [floats(20, 64)])
    # PyTorch's kernel alone wants outputs by sixteens; int8 has a kernel for 48 inputs, if not the native one.
    for quantization, inputs, in_groups in (("int4", 64, True), ("int8", 48, False)):
        layer, pieces = target([floats(20, inputs)]), [floats(20, inputs)]
        converter(quantization, vector_kernels).convert("x", layer, pieces)
        method = layer.method.packed if isinstance(layer.method, HybridMethod) else layer.method
        assert isinstance(method, NativeMethod) == in_groups
    with pytest.raises(ConfigError, match="quantization must be one of"):
        find("int3", "cpu")


def test_amx_keeps_a_copy_for_many_rows(vector_kernels: NativeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    pieces = [stored(Type.Q4_1, 32)]
    layer = target(pieces, bias=True)
    converter("int4", vector_kernels).convert("x", layer, pieces)
    assert isinstance(layer.method, HybridMethod)
    assert isinstance(layer.method.packed, NativeMethod)
    assert layer.method.crossover == AMX_ROWS
    x = torch.randn(AMX_ROWS + 1, COLUMNS).bfloat16()
    assert relative_error(layer(x), layer.method.packed.apply(layer, x)) < 0.01


def test_error_is_sampled_over_all_pieces() -> None:
    """Rows far down count too: the second piece is the coarse one."""
    fine, coarse = stored(Type.Q8_0, 600), floats(600)
    pieces = [StoredMatrix("Q4_1", fine.read, lambda: decode(random_blocks(Type.Q4_1, 600, COLUMNS), Type.Q4_1)), coarse]
    layer = target(pieces)
    done = converter("int4", None).convert("x", layer, pieces)
    true = relative_error(layer.method.dequantize(layer), exact(pieces))
    assert done.error == pytest.approx(true, rel=0.05)


@pytest.mark.parametrize("quantization", ["int4", "int8"])
def test_a_matrix_is_packed_for_the_device_that_holds_it(quantization: str) -> None:
    """No packed kernel runs elsewhere than on the CPU; a copy of the weights there would not be served."""
    layer = Linear(COLUMNS, 32, dtype=torch.bfloat16, device="meta")
    with pytest.raises(ConfigError, match="runs on cpu, not on meta"):
        converter(quantization, load(), "meta").convert("layers.0.mlp.down_proj", layer, [floats(32)])
    assert layer.weight.device.type == "meta"
