"""Products of one row by the kernel in CUDA C++."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.kernels import support
from headrace.kernels.activation import silu_mul
from headrace.kernels.cuda_launch import CudaKernel
from headrace.kernels.linear import cuda_single
from headrace.kernels.linear.cuda_single import MIN_NUMBERS, RowTiling, choose, choose_tiling
from headrace.kernels.linear.fp8 import fp8_linear, fp8_linear_gated, round_rows, streams
from headrace.kernels.linear.fp8_reference import Activations, Fp8Rows, Fp8Weight
from headrace.kernels.support import cdiv

from .captured import check_captured

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
FIXED, DRAWN = RowTiling(8, 4, 3, False), RowTiling(8, 4, 3, True)


def test_kernels_compile(nvrtc: None) -> None:
    for tiling, inputs, groups, result, bias, rounded in [
        (FIXED, 4096, 1, torch.float32, BF16, None),
        (DRAWN, 4096, 2, BF16, None, torch.float16),
        (RowTiling(4, 2, 6, False), 2048, 1, torch.float16, torch.float32, BF16),
    ]:
        compiled = cuda_single._kernel.__wrapped__(tiling, inputs, groups, 4, result, bias, rounded)
        assert compiled.binary().startswith(b"\x7fELF")


@pytest.mark.parametrize(("inputs", "lines", "groups", "wanted"), [
    (4096, 6144, 1, FIXED), (4096, 4096, 1, FIXED), (4096, 12288, 2, DRAWN), (12288, 4096, 1, FIXED),
])  # fmt: skip
def test_tilings_that_were_measured(inputs: int, lines: int, groups: int, wanted: RowTiling) -> None:
    """Those of an 8B on an H200."""
    assert choose_tiling(inputs, lines, groups, 132) == wanted


def test_tilings_fit() -> None:
    """Lines are whole stages, x fits in registers, and two blocks on a multiprocessor, which takes 1 KB more of each."""
    found = 0
    for inputs, lines, groups in itertools.product(range(512, 32768, 512), (1000, 4096, 70_000), (1, 2)):
        tiling = choose_tiling(inputs, lines, groups, 132)
        if tiling is None:
            continue
        found += 1
        pieces, parts = inputs // 128, 8 * groups // tiling.lines
        assert pieces % (8 * tiling.run) == tiling.run % parts == 0 and pieces <= 96 * parts
        turns = cdiv(cdiv(lines * groups, tiling.lines), 264)
        kernel = cuda_single._kernel(tiling, inputs, groups, turns, BF16, None, None)
        assert 2 * (kernel._block[3] + 1024) <= 228 << 10 and kernel._block[3] >= tiling.stages * 1024 * tiling.run
    assert found > 50
    assert choose_tiling(4000, 4096, 1, 132) is None and choose_tiling(32768, 4096, 1, 132) is None


def weight_of(outputs: int, inputs: int) -> Fp8Weight:
    codes = torch.empty(outputs, inputs, dtype=E4M3)
    return Fp8Weight(codes, torch.empty(outputs, 1), torch.ones(()), torch.ones(()))


def row_of(inputs: int) -> Fp8Rows:
    return Fp8Rows(torch.empty(4, inputs, dtype=E4M3), torch.empty(1, 4).t(), 1, BF16)


def test_what_the_kernel_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[Any, ...]] = []
    monkeypatch.setattr(CudaKernel, "launch", lambda self, *arguments: launches.append((self, *arguments)))
    monkeypatch.setattr(cuda_single, "tensor_map", lambda x, *tile: (tuple(x.shape), x.stride(), tile))
    monkeypatch.setattr(cuda_single, "refusals", lambda device: ())
    monkeypatch.setattr(support, "resources", lambda device: SimpleNamespace(multiprocessors=132))
    x, weight, bias, rounded = torch.empty(1, 4096).bfloat16(), weight_of(12_300, 4096), torch.empty(12_300), row_of(4096)
    y = cuda_single.fp8_linear(x, weight, bias, BF16)
    both = cuda_single.fp8_linear(rounded, weight, None, BF16, gated=True)
    assert y is not None and both is not None and (y.shape, both.shape) == ((1, 12_300), (1, 6150))
    (kernel, grid, lines, *given), (gated, few, (_, _, tile), *more) = launches
    # Blocks have as many of 1,538 tiles, or one less.
    assert grid == (257, 1, 1) and given[-3:] == [12_300, 1538, 0] and lines == ((32, 12_300, 128), (128, 4096, 1), (4, 8, 128))
    assert given[:5] == [x.data_ptr(), 0, weight.scales.data_ptr(), bias.data_ptr(), y.data_ptr()]
    assert few == (257, 1, 1) and more[-3:] == [6150, 1538, 0] and tile == (4, 4, 128)
    assert more[:4] == [rounded.codes.data_ptr(), rounded.scales.data_ptr(), weight.scales.data_ptr(), 0]
    wanted = {
        "OUT_KIND": 0, "INPUTS": 4096, "LINES": 8, "GROUPS": 1, "WARPS": 8, "STAGES": 3, "RUN": 4, "RESIDENT": 2,
        "FIXED": 6, "DRAWS": 0, "FLUSH": 6, "BIAS": 3, "ROUNDS": 1,
    }  # fmt: skip
    assert kernel._macros == wanted and gated._macros == wanted | {"GROUPS": 2, "BIAS": 0, "ROUNDS": 0}


def test_which_products_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row and large weights with a scale an output, whose lines are whole pieces."""
    monkeypatch.setattr(cuda_single, "refusals", lambda device: ())
    monkeypatch.setattr(CudaKernel, "launch", lambda self, *arguments: None)
    monkeypatch.setattr(cuda_single, "tensor_map", lambda x, *tile: b"")
    weight = weight_of(MIN_NUMBERS // 4096, 4096)
    assert streams(weight) and choose(weight, 2) is not None
    assert not streams(weight_of(4095, 4096)) and not streams(weight_of(5000, 4112))
    assert not streams(Fp8Weight(weight.codes, torch.empty(32, 32), weight.one, weight.turns))

    def taken(x: Activations) -> bool:
        return cuda_single.fp8_linear(x, weight, None, BF16) is not None

    x = torch.empty(2, 4096).half()
    assert taken(row_of(4096)) and taken(x[:1])
    assert not taken(row_of(4096)._replace(rows=2)) and not taken(x) and not taken(x[:1].float()) and not taken(x[:0])
    long = weight_of(4096, 8192)
    assert cuda_single.fp8_linear(torch.empty(1, 8192).half(), long, None, BF16) is None
    monkeypatch.setattr(cuda_single, "refusals", lambda device: ("it is no Hopper",))
    assert not streams(weight)


def operands(inputs: int, out: int) -> tuple[torch.Tensor, Fp8Weight, torch.Tensor]:
    torch.manual_seed(inputs)
    x, weight, bias = torch.randn(1, inputs), torch.randn(out, inputs) * inputs**-0.5, torch.randn(out)
    scales, one = torch.rand(out, 1, device="cuda") + 0.5, torch.ones((), device="cuda")
    return x.to("cuda", BF16), Fp8Weight(weight.cuda().to(E4M3), scales, one, one), bias.to("cuda", BF16)


SHAPES = [(4096, 1001), (4096, 24_571), (12_288, 4096), (2048, 151_936), (5120, 3000), (14_336, 4096)]
"""Outputs that are no whole tiles, tiles that are drawn, and lines of other tilings."""


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bitwise the same again and again, and from a row that blocks round."""
    monkeypatch.setattr(cuda_single, "MIN_NUMBERS", 0)
    x, weight, bias = operands(*shape)
    rounded = round_rows(x, shape[0])
    wanted = rounded.codes[:1].double() * rounded.scales[:1].double() @ (weight.codes.double() * weight.scales.double()).t()
    got = cuda_single.fp8_linear(rounded, weight, bias, torch.float32)
    assert got is not None
    torch.testing.assert_close(got.double(), wanted + bias.double(), atol=1e-3, rtol=1e-3)
    for _ in range(10):
        assert torch.equal(fp8_linear(rounded, weight, bias, torch.float32), got)
    for kind in (BF16, torch.float16):
        floats = x.to(kind)
        assert torch.equal(fp8_linear(floats, weight, None, kind), fp8_linear(round_rows(floats, shape[0]), weight, None, kind))
    even = shape[1] // 2 * 2
    both = fp8_linear_gated(rounded, weight._replace(codes=weight.codes[:even], scales=weight.scales[:even]))
    # Lines of an odd number of pieces are not shared by gate and up.
    assert (both is None) == (shape[0] == 5120)
    if both is not None:
        torch.testing.assert_close(both, silu_mul(wanted[:, :even].bfloat16()), atol=2e-2, rtol=2e-2)
    assert not support.counters("single", x.device).any()


@pytest.mark.gpu
@GPU
def test_rows_that_are_no_numbers() -> None:
    """Zeros, the largest numbers and a NaN are rounded within as they are before."""
    _, weight, _ = operands(4096, 4096)
    for value in (0.0, 1e-30, 3e38, torch.nan):
        x = torch.zeros(1, 4096, device="cuda", dtype=BF16)
        x[0, 77] = value
        got, wanted = fp8_linear(x, weight), fp8_linear(round_rows(x, 4096), weight)
        assert torch.equal(got.isnan(), wanted.isnan()) and torch.equal(got.nan_to_num(), wanted.nan_to_num())


@pytest.mark.gpu
@GPU
def test_captured() -> None:
    """Products behind each other, of which each begins before the one before is complete."""
    first, second = operands(4096, 24_576)[1], operands(12_288, 4096)[1]

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            gated = fp8_linear_gated(round_rows(x, 4096), first)
            assert gated is not None
            x = fp8_linear(gated, second)
        return x

    check_captured(1, 4096, chain)
