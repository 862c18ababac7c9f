"""Products of one row by the kernel in CUDA C++."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.kernels import linear as product
from headrace.kernels.activation import silu_mul
from headrace.kernels.cuda_launch import CudaKernel, counters
from headrace.kernels.linear import cuda_single
from headrace.kernels.linear.cuda_single import MIN_NUMBERS, RowTiling, choose, choose_tiling
from headrace.kernels.linear.fp8 import fp8_linear, fp8_linear_gated, round_rows
from headrace.kernels.linear.fp8_reference import Fp8Rows, Fp8Weight
from headrace.kernels.support import cdiv

from .captured import check_captured

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
FIXED, DRAWN = RowTiling(8, 4, 3, False), RowTiling(8, 4, 3, True)


@pytest.mark.parametrize("kind", [BF16, torch.float16, E4M3])
def test_kernels_compile(kind: torch.dtype, nvrtc: None) -> None:
    compiled = cuda_single._kernel.__wrapped__
    small = BF16 if kind == E4M3 else kind
    for tiling, inputs, groups, result, bias, rounded in [
        (FIXED, 4096, 1, torch.float32, BF16, None),
        (DRAWN, 4096, 2, small, None, None),
        (RowTiling(4, 2, 6, False), 2048, 1, small, torch.float32, small if kind == E4M3 else None),
    ]:
        assert compiled(tiling, inputs, groups, 4, kind, result, bias, rounded).binary().startswith(b"\x7fELF")


@pytest.mark.parametrize(("inputs", "size", "lines", "groups", "wanted"), [
    (4096, 1, 6144, 1, FIXED), (4096, 1, 12288, 2, DRAWN), (12288, 1, 4096, 1, FIXED),
    (4096, 2, 12288, 2, RowTiling(8, 4, 2, True)), (12288, 2, 4096, 1, RowTiling(8, 4, 2, False)),
])  # fmt: skip
def test_tilings_that_were_fastest(inputs: int, size: int, lines: int, groups: int, wanted: RowTiling) -> None:
    """Those of an 8B on an H200."""
    assert choose_tiling(inputs, size, lines, groups, 132) == wanted


def test_tilings_fit() -> None:
    """Lines are whole stages, x fits in registers, and two blocks on a multiprocessor, which takes 1 KB more of each."""
    found = 0
    for inputs, size, lines, groups in itertools.product(range(512, 32768, 512), (1, 2), (1000, 4096, 70_000), (1, 2)):
        tiling = choose_tiling(inputs, size, lines, groups, 132)
        if tiling is None:
            continue
        found += 1
        pieces, parts = inputs * size // 128, 8 * groups // tiling.lines
        assert pieces % (8 * tiling.run) == tiling.run % parts == 0 and pieces * (8 // size) <= 8 * 96 * parts
        turns = cdiv(cdiv(lines * groups, tiling.lines), 264)
        kernel = cuda_single._kernel(tiling, inputs, groups, turns, E4M3 if size == 1 else BF16, BF16, None, None)
        assert 2 * (kernel._block[3] + 1024) <= 228 << 10 and kernel._block[3] >= tiling.stages * 1024 * tiling.run
    assert found > 100
    assert choose_tiling(4000, 1, 4096, 1, 132) is None and choose_tiling(32768, 2, 4096, 1, 132) is None


def test_what_the_kernel_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[Any, ...]] = []
    monkeypatch.setattr(CudaKernel, "launch", lambda self, *arguments: launches.append((self, *arguments)))
    monkeypatch.setattr(cuda_single, "tensor_map", lambda x, *tile: (tuple(x.shape), x.stride(), tile))
    monkeypatch.setattr(cuda_single, "refusals", lambda device: ())
    monkeypatch.setattr(cuda_single.support, "resources", lambda device: SimpleNamespace(multiprocessors=132))
    weight, x, bias = torch.empty(12_300, 4096, dtype=E4M3), torch.empty(1, 4096).bfloat16(), torch.empty(12_300)
    codes = Fp8Weight(weight, torch.empty(12_300, 1), torch.ones(()), torch.ones(()))
    y = cuda_single.fp8_linear(x, codes, bias, BF16)
    rounded = Fp8Rows(torch.empty(4, 4096, dtype=E4M3), torch.empty(1, 4).t(), 1, BF16)
    both = cuda_single.fp8_linear(rounded, codes, None, BF16, gated=True)
    assert y is not None and both is not None and (y.shape, both.shape) == ((1, 12_300), (1, 6150))
    (kernel, grid, lines, *given), (gated, few, (_, _, tile), *more) = launches
    # Blocks have one of 1,538 tiles less than others, or as many.
    assert grid == (257, 1, 1) and given[-3:] == [12_300, 1538, 0] and lines == ((32, 12_300, 128), (128, 4096, 1), (4, 8, 128))
    assert given[:5] == [x.data_ptr(), 0, codes.scales.data_ptr(), bias.data_ptr(), y.data_ptr()]
    assert few == (257, 1, 1) and more[-3:] == [6150, 1538, 0] and tile == (4, 4, 128)
    assert more[:4] == [rounded.codes.data_ptr(), rounded.scales.data_ptr(), codes.scales.data_ptr(), 0]
    wanted = {
        "KIND": 2, "OUT_KIND": 0, "INPUTS": 4096, "LINES": 8, "GROUPS": 1, "WARPS": 8, "STAGES": 3, "RUN": 4, "RESIDENT": 2,
        "FIXED": 6, "DRAWS": 0, "FLUSH": 6, "BIAS": 3, "ROUNDS": 1,
    }  # fmt: skip
    assert kernel._macros == wanted and gated._macros == wanted | {"GROUPS": 2, "BIAS": 0, "ROUNDS": 0}


def test_which_products_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row and large weights, whose lines are whole pieces."""
    monkeypatch.setattr(cuda_single, "refusals", lambda device: ())
    x, weight = torch.empty(2, 4096).bfloat16(), torch.empty(MIN_NUMBERS // 4096, 4096).bfloat16()
    assert choose(x[:1], weight) is not None and choose(x[:1], weight, groups=2) is not None
    assert choose(x, weight) is None and choose(x[:1], weight[:-1]) is None and choose(x[:0], weight) is None
    assert choose(x[:1].float(), weight.float()) is None
    assert choose(torch.empty(1, 4104).bfloat16(), torch.empty(5000, 4104).bfloat16()) is None
    wide = torch.empty(5000, 8192).bfloat16()
    assert choose(x[:1], wide[:, :4096]) is None
    blocks = Fp8Weight(torch.empty(4096, 4096, dtype=E4M3), torch.empty(32, 32), torch.ones(()), torch.ones(()))
    assert cuda_single.fp8_linear(x[:1], blocks, None, BF16) is None
    monkeypatch.setattr(cuda_single, "refusals", lambda device: ("it is no Hopper",))
    assert choose(x[:1], weight) is None


def operands(inputs: int, out: int, kind: torch.dtype = BF16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(inputs)
    numbers = torch.randn(1, inputs), torch.randn(out, inputs) * inputs**-0.5, torch.randn(out)
    return tuple(number.to("cuda", kind) for number in numbers)  # type: ignore[return-value]


SHAPES = [(4096, 1001), (4096, 24_571), (12_288, 4096), (2048, 151_936), (5120, 3000), (14_336, 4096)]
"""Outputs that are no whole tiles, tiles that are drawn, and lines of other tilings."""


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("kind", [BF16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: tuple[int, int], kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bitwise the same again and again."""
    monkeypatch.setattr(cuda_single, "MIN_NUMBERS", 0)
    x, weight, bias = operands(*shape, kind)
    got = product.linear(x, weight, bias, torch.float32)
    assert choose(x, weight) is not None
    wanted = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(got.double(), wanted, atol=1e-4, rtol=1e-4)
    for _ in range(10):
        assert torch.equal(product.linear(x, weight, bias, torch.float32), got)
    assert not counters("single", x.device).any()


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp8(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that blocks round gives the numbers of one that is rounded before."""
    monkeypatch.setattr(cuda_single, "MIN_NUMBERS", 0)
    x, weight, bias = operands(*shape)
    codes = Fp8Weight(weight.to(E4M3), torch.rand(shape[1], 1, device="cuda") + 0.5, torch.ones((), device="cuda"), weight)
    rounded = round_rows(x, shape[0])
    floats = rounded.codes[:1].double() * rounded.scales[:1].double()
    wanted = floats @ (codes.codes.double() * codes.scales.double()).t()
    got = cuda_single.fp8_linear(rounded, codes, bias, torch.float32)
    assert got is not None
    torch.testing.assert_close(got.double(), wanted + bias.double(), atol=1e-3, rtol=1e-3)
    for kind in (BF16, torch.float16):
        assert torch.equal(
            fp8_linear(x.to(kind), codes, bias, torch.float32),
            fp8_linear(round_rows(x.to(kind), shape[0]), codes, bias, torch.float32),
        )
    half = Fp8Weight(codes.codes[: shape[1] // 2 * 2], codes.scales[: shape[1] // 2 * 2], codes.one, codes.turns)
    both = fp8_linear_gated(rounded, half)
    assert both is not None
    torch.testing.assert_close(both, silu_mul(wanted[:, : shape[1] // 2 * 2].bfloat16()), atol=2e-2, rtol=2e-2)
    assert not counters("single", x.device).any()


@pytest.mark.gpu
@GPU
def test_rows_that_are_no_numbers() -> None:
    """Zeros, the largest numbers and a NaN are rounded within as they are before."""
    _, weight, _ = operands(4096, 4096)
    codes = Fp8Weight(weight.to(E4M3), torch.ones(4096, 1, device="cuda"), torch.ones((), device="cuda"), weight)
    for value in (0.0, 1e-30, 3e38, torch.nan):
        x = torch.zeros(1, 4096, device="cuda", dtype=BF16)
        x[0, 77] = value
        got, wanted = fp8_linear(x, codes), fp8_linear(round_rows(x, 4096), codes)
        assert torch.equal(got.isnan(), wanted.isnan()) and torch.equal(got.nan_to_num(), wanted.nan_to_num())


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("kind", [BF16, torch.float16])
@pytest.mark.parametrize("shape", [(4096, 24_576), (4096, 4118)], ids=str)
def test_gated(shape: tuple[int, int], kind: torch.dtype) -> None:
    x, weight, _ = operands(*shape, kind)
    got = product.linear_gated(x, weight)
    wanted = silu_mul(torch.nn.functional.linear(x.double(), weight.double()).to(kind))
    assert got is not None and got.shape == (1, shape[1] // 2)
    torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@GPU
def test_captured() -> None:
    """Products behind each other, of which each begins before the one before is complete."""
    first, second = operands(4096, 24_576)[1], operands(12_288, 4096)[1]

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            gated = product.linear_gated(x, first)
            assert gated is not None
            x = product.linear(gated, second)
        return product.linear(x, first)

    check_captured(1, 4096, chain)
