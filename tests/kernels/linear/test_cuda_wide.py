"""Products of 2 to 64 rows by the kernel in CUDA C++."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from headrace.kernels import linear as product
from headrace.kernels.activation import silu_mul
from headrace.kernels.cuda_launch import CudaKernel
from headrace.kernels.linear import cuda_wide
from headrace.kernels.linear.cuda_wide import MAX_ROWS, MIN_NUMBERS, CudaTiling, choose, choose_tiling, gated, linear, takes
from headrace.kernels.linear.fp8 import fp8_linear, round_rows
from headrace.kernels.linear.fp8_reference import Fp8Weight
from headrace.kernels.linear.fp8_tilings import FEW_ROWS

from .captured import check_captured

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
TILINGS = [
    (8, CudaTiling(16, 1, 108)),
    (8, CudaTiling(16, 1, 72)),
    (16, CudaTiling(16, 2, 54, 2)),
    (8, CudaTiling(32, 4, 72)),
    (32, CudaTiling(32, 1, 216)),
    (64, CudaTiling(64, 2, 216)),
    (16, CudaTiling(64, 8, 72, 2)),
    (32, CudaTiling(128, 1, 108)),
    (64, CudaTiling(128, 4, 108, 2)),
]
"""Most rows, and tilings of each size."""


@pytest.mark.parametrize("kind", [BF16, torch.float16, E4M3])
def test_kernels_compile(kind: torch.dtype, nvrtc: None) -> None:
    results = itertools.cycle([(BF16, None), (torch.float16, torch.float16), (torch.float32, BF16)])
    for (rows, tiling), (result, bias) in zip(TILINGS, results, strict=False):
        assert cuda_wide._kernel.__wrapped__(tiling, rows, kind, result, bias).binary().startswith(b"\x7fELF")
    if kind != E4M3:
        assert cuda_wide._kernel.__wrapped__(cuda_wide._GATED, 64, kind, kind, None, True).binary().startswith(b"\x7fELF")


def test_each_tiling_takes_its_rows() -> None:
    """Shared memory of a multiprocessor of Hopper: 228 KB, of which a block takes 1 KB more than it asks for."""
    for most, tilings in cuda_wide._TILINGS:
        for tiling in tilings:
            assert most * tiling.fold <= MAX_ROWS and tiling.stages(most) >= 4
            assert (216 // tiling.kilobytes) * (tiling.shared(8) + 1024) <= 228 << 10


@pytest.mark.parametrize(("rows", "out", "wanted"), [
    (8, 4096, (16, 1, 108)), (8, 6144, (32, 2, 72)), (8, 24576, (64, 1, 72)), (9, 4096, (32, 2, 108)), (32, 6144, (32, 2, 72)),
    (32, 151936, (64, 1, 72)), (33, 4096, (64, 2, 216, 2)), (64, 6144, (64, 1, 216, 2)), (64, 24576, (64, 1, 72)),
])  # fmt: skip
def test_tilings_that_were_fastest(rows: int, out: int, wanted: tuple[int, ...]) -> None:
    """Those of an 8B on an H200."""
    assert choose_tiling(rows, out, 132) == CudaTiling(*wanted)


@pytest.mark.parametrize(("rows", "out", "wanted"), [
    (8, 2048, (16, 1, 108)), (8, 5120, (16, 1, 72)), (16, 2048, (16, 1, 108)), (32, 2048, (32, 2, 108)),
    (32, 5120, (32, 1, 108)), (64, 2048, (64, 2, 216, 2)), (64, 5120, (64, 1, 216, 2)),
])  # fmt: skip
def test_tilings_of_small_weights(rows: int, out: int, wanted: tuple[int, ...]) -> None:
    """Those of a mixture of 30B on an H200."""
    assert choose_tiling(rows, out, 132, small=True) == CudaTiling(*wanted)


@pytest.mark.parametrize("rows", [2, 13, 32])
def test_what_the_kernel_is_given(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grid shares out all steps, sums of tiles that are shared have a place, and parts of wider tensors their strides."""
    launches: list[tuple[object, ...]] = []
    monkeypatch.setattr(CudaKernel, "launch", lambda self, *arguments: launches.append((self, *arguments)))
    monkeypatch.setattr(cuda_wide, "tensor_map", lambda x, height, width: (tuple(x.shape), x.stride(0), height, width))
    x, weight, bias = torch.ones(rows, 1024).bfloat16()[:, :520], torch.ones(100, 520).bfloat16(), torch.ones(100)
    tiling = CudaTiling(32, 4, 72, 2)
    y = linear(x, weight, bias, torch.float32, tiling=tiling)
    assert (y.shape, y.dtype) == ((rows, 100), torch.float32)
    ((kernel, grid, *maps, at, bias_at, x_scales, weight_scales, given, out, steps),) = launches
    wide = max(8, 1 << (rows - 1).bit_length())
    assert grid == (16, 1, 1) and (given, out, steps) == (rows, 100, math.ceil(520 / 256))
    assert maps == [((100, 520), 520, 32, 64), ((rows, 520), 1024, wide, 64)]
    assert (at, bias_at, x_scales, weight_scales) == (y.data_ptr(), bias.data_ptr(), 0, 0)
    assert isinstance(kernel, CudaKernel) and kernel._macros == {
        "KIND": 0, "ROWS": wide, "TILE": 32, "SPLIT": 4, "LINES": 2, "STAGES": tiling.stages(wide), "Y_KIND": 2, "BIAS": 3,
        "GATED": 0,
    }  # fmt: skip


def test_halves_that_are_gated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block has as many lines of the gate as of what it gates. Products of another tiling are left alone."""
    launches: list[tuple[object, ...]] = []
    monkeypatch.setattr(CudaKernel, "launch", lambda self, *arguments: launches.append((self, *arguments)))
    monkeypatch.setattr(cuda_wide, "tensor_map", lambda x, height, width: (tuple(x.shape), height, width))
    monkeypatch.setattr(cuda_wide, "refusals", lambda device: ())
    x, weight = torch.empty(8, 1024).bfloat16(), torch.empty(20_000, 1024).bfloat16()
    y = gated(x, weight)
    assert y is not None and (y.shape, y.dtype) == ((8, 10_000), BF16)
    ((kernel, grid, *maps, _, _, _, _, rows, out, steps),) = launches
    assert (grid, rows, out, steps) == ((313, 1, 1), 8, 10_000, 16)
    assert maps == [((20_000, 1024), 32, 64), ((8, 1024), 8, 64)]
    assert isinstance(kernel, CudaKernel) and kernel._macros["GATED"] == 1
    assert gated(x[:1], weight) is None and gated(x, weight[:-1]) is None
    monkeypatch.setattr(cuda_wide, "choose_tiling", lambda rows, out, multiprocessors, **kind: CudaTiling(32, 2, 72))
    assert gated(x, weight) is None


def test_which_products_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large weights with 2 to 64 rows, whose rows are whole pieces of 16 bytes."""
    monkeypatch.setattr(cuda_wide, "refusals", lambda device: ())
    x, weight = torch.empty(65, 4096).bfloat16(), torch.empty(MIN_NUMBERS // 4096, 4096).bfloat16()
    assert [choose(x[:rows], weight) is not None for rows in (1, 2, 64, 65)] == [False, True, True, False]
    assert choose(x[:2], weight[:-1]) is None
    small = torch.empty(2048, 4096).bfloat16()
    assert [choose(x[:rows], small) is not None for rows in (7, 8, 64, 65)] == [False, True, True, False]
    assert [choose(x[:rows].to(E4M3), small.to(E4M3)) is not None for rows in (16, 17)] == [False, True]
    more = torch.empty(5120, 2048).bfloat16()
    assert [choose(x[:rows, :2048], more) is not None for rows in (7, 8, 9, 16, 17)] == [False, True, False, False, True]
    assert choose(x[:64], small[:-1]) is None
    assert takes(x[:2, 8:], weight[:, 8:]) and not takes(x[:2, 4:], weight[:, 4:]) and not takes(x[:2, :60], weight[:, :60])
    assert not takes(x[:2].float(), weight.float())
    monkeypatch.setattr(cuda_wide, "refusals", lambda device: ("it is no Hopper",))
    assert choose(x[:2], weight) is None


def operands(rows: int, inputs: int, out: int, kind: torch.dtype = BF16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows)
    numbers = torch.randn(rows, inputs), torch.randn(out, inputs) * inputs**-0.5, torch.randn(out)
    return tuple(number.to("cuda", kind) for number in numbers)  # type: ignore[return-value]


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("kind", [BF16, torch.float16])
@pytest.mark.parametrize(("most", "tiling"), TILINGS, ids=str)
def test_shapes(most: int, tiling: CudaTiling, kind: torch.dtype) -> None:
    """Channels and outputs are no multiples of a tile's; weights of few steps and of many; bitwise the same again and again."""
    for (inputs, out), rows in itertools.product([(8, 64), (520, 130), (1000, 201), (4096, 1024)], (most // 2 + 1, most)):
        x, weight, bias = operands(rows, inputs, out, kind)
        got = linear(x, weight, bias, torch.float32, tiling=tiling)
        wanted = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
        torch.testing.assert_close(got.double(), wanted, atol=1e-4, rtol=1e-4)
        for _ in range(10):
            assert torch.equal(linear(x, weight, bias, torch.float32, tiling=tiling), got)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(("most", "tiling"), TILINGS, ids=str)
def test_fp8(most: int, tiling: CudaTiling) -> None:
    for (inputs, out), rows in itertools.product([(16, 64), (1040, 208), (12288, 1024)], (most // 2 + 1, most)):
        x, weight, bias = operands(rows, inputs, out)
        scales, one = torch.rand(out, 1, device="cuda") + 0.5, torch.ones((), device="cuda")
        codes = Fp8Weight(weight.to(E4M3), scales, one, one)
        rounded = round_rows(x, inputs)
        got = cuda_wide.fp8_linear(rounded, codes, bias, torch.float32, tiling)
        wanted = rounded.codes[:rows].double() * rounded.scales[:rows].double() @ (codes.codes.double() * scales.double()).t()
        torch.testing.assert_close(got.double(), wanted + bias.double(), atol=1e-3, rtol=1e-3)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("shape", [(4096, 4096), (12288, 4096), (4096, 6144), (4096, 24576)], ids=str)
@pytest.mark.parametrize("rows", [2, 16, 17, 64])
def test_chosen_tilings(shape: tuple[int, int], rows: int) -> None:
    """Large weights take the kernel, in FP8 too from 17 rows on, which rounds once."""
    x, weight, bias = operands(rows, *shape)
    wanted = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    assert cuda_wide.choose(x, weight) is not None
    torch.testing.assert_close(product.linear(x, weight, bias).double(), wanted, atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(product.linear(x, weight, bias, torch.float32).double(), wanted, atol=1e-4, rtol=1e-4)
    if rows <= FEW_ROWS:
        return
    one = torch.ones((), device="cuda")
    codes, rounded = Fp8Weight(weight.to(E4M3), one.expand(len(weight), 1).contiguous(), one, one), round_rows(x, shape[0])
    floats = rounded.codes[:rows].double() * rounded.scales[:rows].double()
    got = fp8_linear(rounded, codes, bias)
    torch.testing.assert_close(got.double(), floats @ codes.codes.double().t() + bias.double(), atol=2e-2, rtol=1e-2)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("rows", [2, 16, 29, 64])
@pytest.mark.parametrize(("inputs", "out"), [(4096, 24576), (1000, 16_802)])
def test_gated(rows: int, inputs: int, out: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded where the product and the activation are. 16,802 outputs are no whole tiles, and 8,401 are stored one by one."""
    monkeypatch.setattr(cuda_wide, "choose_tiling", lambda rows, out, multiprocessors, **kind: cuda_wide._GATED)
    x, weight, _ = operands(rows, inputs, out)
    got = product.linear_gated(x, weight)
    wanted = silu_mul(torch.nn.functional.linear(x.double(), weight.double()).bfloat16())
    assert got is not None and got.shape == (rows, out // 2)
    torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2)
    for _ in range(3):
        again = product.linear_gated(x, weight)
        assert again is not None and torch.equal(again, got)


@pytest.mark.gpu
@GPU
def test_parts_of_wider_tensors() -> None:
    x, weight, _ = operands(5, 512, 300)
    got = linear(x[:, 128:384], weight[40:140, 128:384], tiling=CudaTiling(32, 2, 72))
    wanted = torch.nn.functional.linear(x[:, 128:384].double(), weight[40:140, 128:384].double())
    torch.testing.assert_close(got.double(), wanted, atol=1e-2, rtol=1e-2)


@pytest.mark.gpu
@GPU
def test_captured() -> None:
    """Products behind each other, of which each begins before the one before is complete."""
    first, second = operands(2, 4096, 6144)[1], operands(2, 6144, 4096)[1]
    for rows in (8, 64):
        check_captured(rows, 4096, lambda x: product.linear(product.linear(product.linear(x, first), second), first))
