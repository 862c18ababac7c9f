"""Which format a matrix gets, with native kernels and without, and that the reported error is the true one."""

from __future__ import annotations

import pytest
import torch
from gguf.quants import dequantize
from torch.nn.functional import linear

from headrace.errors import ConfigError
from headrace.kernels.native import NativeKernels, load
from headrace.layers.linear import Linear
from headrace.quant import convert
from headrace.quant.convert import AMX_ROWS, INT4_ROWS, INT8_ROWS, Converter, Piece
from headrace.quant.gguf_blocks import decode
from headrace.quant.groups import relative_error
from headrace.quant.hybrid import HybridLinear
from headrace.quant.int4 import Int4Linear
from headrace.quant.int8 import Int8Linear
from headrace.quant.native import NativeLinear

from .blocks import Type, random_blocks

COLUMNS = 256


@pytest.fixture
def vector_kernels() -> NativeKernels:
    found = load()
    if found is None or found.tile == "portable":
        pytest.skip("no native products here")
    return found


def stored(kind: Type, rows: int, seed: int = 0) -> Piece:
    blocks = random_blocks(kind, rows, COLUMNS, seed)
    return Piece(kind.name, decode(blocks, kind), lambda: torch.from_numpy(dequantize(blocks, kind)))


def floats(rows: int, columns: int = COLUMNS, seed: int = 0) -> Piece:
    weight = 0.02 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return Piece("BF16", None, lambda: weight.bfloat16())


def target(pieces: list[Piece], *, bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> Linear:
    shapes = [tuple(piece.exact().shape) for piece in pieces]
    module = Linear(shapes[0][1], sum(shape[0] for shape in shapes), bias=bias, dtype=dtype, device="cpu")
    if module.bias is not None:
        module.bias.data.normal_()
    return module


def exact(pieces: list[Piece]) -> torch.Tensor:
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
    done = Converter("int4", vector_kernels).convert("layers.0.mlp.down_proj", module, pieces)
    packed = done.module.packed if isinstance(done.module, HybridLinear) else done.module
    assert isinstance(packed, NativeLinear)
    assert packed.bits == bits
    assert done.error == pytest.approx(relative_error(packed.dequantize(), exact(pieces)), rel=1e-3, abs=1e-8)
    assert (done.error == 0) == is_exact
    assert done.error < (0.12 if bits == 4 and "floats" in name else 0.01)
    x = torch.randn(3, COLUMNS).bfloat16()
    expected = linear(x.float(), packed.dequantize(), None if module.bias is None else module.bias.float())
    assert relative_error(done.module(x), expected) < 0.01


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_without_native(name: str, bias: bool) -> None:
    pieces, bits, _ = CASES[name]
    module = target(pieces, bias=bias)
    done = Converter("int4", None).convert("layers.0.mlp.down_proj", module, pieces)
    assert isinstance(done.module, HybridLinear)
    assert isinstance(done.module.packed, Int4Linear if bits == 4 else Int8Linear)
    assert done.module.crossover == (INT4_ROWS if bits == 4 else INT8_ROWS)
    assert done.error == pytest.approx(relative_error(done.module.dequantize(), exact(pieces)), rel=1e-3)
    assert 0 < done.error < (0.12 if "floats" in name else 0.02)
    assert torch.equal(done.module.copy, exact(pieces).bfloat16())
    for rows, weight in ((1, done.module.dequantize()), (40, exact(pieces))):
        x = torch.randn(rows, COLUMNS).bfloat16()
        expected = linear(x.float(), weight, None if module.bias is None else module.bias.float())
        assert relative_error(done.module(x), expected) < 0.01


def test_the_head_keeps_eight_bits(vector_kernels: NativeKernels) -> None:
    pieces = [stored(Type.Q4_1, 32)]
    done = Converter("int4", vector_kernels).convert("lm_head", target(pieces), pieces, is_head=True)
    assert "8 bits" in done.module.format
    assert done.error == 0
    assert "head" in done.reason


def test_int8_widens_what_has_fewer_bits(vector_kernels: NativeKernels) -> None:
    pieces = [stored(Type.Q4_1, 32)]
    done = Converter("int8", vector_kernels).convert("x", target(pieces), pieces)
    assert "8 bits" in done.module.format
    assert done.error == 0
    assert Converter("int8", vector_kernels).convert("x", target([floats(32)]), [floats(32)]).error < 0.01


def test_scales_beyond_half_precision_go_elsewhere(vector_kernels: NativeKernels) -> None:
    weight = torch.randn(16, 64) * 1e7
    pieces = [Piece("F32", None, lambda: weight)]
    done = Converter("int4", vector_kernels).convert("x", target(pieces), pieces)
    assert isinstance(done.module, HybridLinear)
    assert isinstance(done.module.packed, Int4Linear)
    assert done.error < 0.12


def test_shapes_that_no_kernel_takes(vector_kernels: NativeKernels) -> None:
    for kernels in (vector_kernels, None):
        with pytest.raises(ConfigError, match=r"int4 cannot hold layers\.3\.mlp\.down_proj: 40 inputs") as error:
            Converter("int4", kernels).convert("layers.3.mlp.down_proj", target([floats(16, 40)]), [floats(16, 40)])
        assert error.value.param == "quantization"
    with pytest.raises(ConfigError, match="20 outputs"):
        Converter("int4", None).convert("x", target([floats(20, 64)]), [floats(20, 64)])
    assert isinstance(
        Converter("int4", vector_kernels).convert("x", target([floats(20, 64)]), [floats(20, 64)]).module, NativeLinear
    )
    # int8 has a kernel for 48 inputs, if not the native one.
    packed = Converter("int8", vector_kernels).convert("x", target([floats(20, 48)]), [floats(20, 48)]).module
    assert isinstance(packed, HybridLinear)
    with pytest.raises(ConfigError, match="quantization must be one of"):
        Converter("int3", None)


def test_amx_keeps_a_copy_for_many_rows(vector_kernels: NativeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert.torch.cpu, "_is_amx_tile_supported", lambda: True)
    pieces = [stored(Type.Q4_1, 32)]
    done = Converter("int4", vector_kernels).convert("x", target(pieces, bias=True), pieces)
    assert isinstance(done.module, HybridLinear)
    assert isinstance(done.module.packed, NativeLinear)
    assert done.module.crossover == AMX_ROWS
    x = torch.randn(AMX_ROWS + 1, COLUMNS).bfloat16()
    assert relative_error(done.module(x), done.module.packed(x)) < 0.01


def test_error_is_sampled_over_all_pieces() -> None:
    """Rows far down count too: the second piece is the coarse one."""
    fine, coarse = stored(Type.Q8_0, 600), floats(600)
    pieces = [Piece("Q4_1", decode(random_blocks(Type.Q4_1, 600, COLUMNS), Type.Q4_1), fine.read), coarse]
    done = Converter("int4", None).convert("x", target(pieces), pieces)
    assert isinstance(done.module, HybridLinear)
    true = relative_error(done.module.dequantize(), exact(pieces))
    assert done.error == pytest.approx(true, rel=0.05)
