"""Products of a few rows against torch's."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear as ref

from headrace.kernels.linear.triton import MAX_ROWS, LinearTiling, choose_tiling, linear
from kernels.closeness import STEP, close

SHAPES = [(64, 32), (100, 7), (1000, 33), (2600, 20), (3, 1)]
"""(in, out)"""


def operands(rows: int, shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    size_in, size_out = shape
    x, weight = torch.randn(rows, size_in), torch.randn(size_out, size_in) * size_in**-0.5
    return tuple(t.to(dtype) for t in (x, weight, torch.randn(size_out)))


def check(got: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Against float64, rounded where the type is."""
    expected = ref(x.double(), weight.double(), None if bias is None else bias.double()).to(x.dtype)
    # The error of a sum grows with the root of its length.
    bound = max(2.0, x.shape[1] ** 0.5 / 8) * STEP[x.dtype]
    torch.testing.assert_close(got.cpu(), expected, atol=bound, rtol=2 * STEP[x.dtype])


@pytest.mark.parametrize("with_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("rows", [1, 2, 5, 16, MAX_ROWS])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: tuple[int, int], rows: int, with_bias: bool, device: torch.device) -> None:
    x, weight, bias = operands(rows, shape, torch.float32)
    got = linear(x.to(device), weight.to(device), bias.to(device) if with_bias else None)
    check(got, x, weight, bias if with_bias else None)


@pytest.mark.parametrize("rows", [1, 3, 9, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_types(dtype: torch.dtype, rows: int, device: torch.device) -> None:
    x, weight, bias = operands(rows, (300, 20), dtype)
    got = linear(*(t.to(device) for t in (x, weight, bias)))
    assert got.dtype == dtype
    check(got, x, weight, bias)


@pytest.mark.parametrize("rows", [1, 4])
def test_parts_of_wider_tensors(rows: int, device: torch.device) -> None:
    """Numbers beside x or the weight are not read."""
    x, weight, _ = operands(rows, (40, 12), torch.float32)
    wide = [torch.full((len(t), t.shape[1] + 10), torch.nan).to(device) for t in (x, weight)]
    for target, source in zip(wide, (x, weight), strict=True):
        target[:, 5:-5] = source.to(device)
    x_view, weight_view = (t[:, 5:-5] for t in wide)
    close(linear(x_view, weight_view), ref(x, weight), steps=4)


TILINGS = [
    LinearTiling(8, 64, 2, 1),
    LinearTiling(8, 512, 8, 4),
    LinearTiling(8, 64, 2, 2),
    LinearTiling(16, 128, 4, 2),
    LinearTiling(16, 128, 2, 9),
    LinearTiling(32, 256, 4, 3),
]
"""Runs of 32 channels, one to three of each warp; tiles ahead, fewer and more than there are."""


@pytest.mark.parametrize("rows", [1, 2, 8, 9, 17])
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_tilings(tiling: LinearTiling, rows: int, device: torch.device) -> None:
    x, weight, _ = operands(rows, (600, 50), torch.float32)
    close(linear(x.to(device), weight.to(device), tiling=tiling), ref(x, weight), steps=8)


@pytest.mark.parametrize("tiling", [LinearTiling(2, 64, 4, 0), LinearTiling(16, 256, 4, 0)], ids=str)
def test_tilings_of_one_row(tiling: LinearTiling, device: torch.device) -> None:
    x, weight, _ = operands(1, (200, 50), torch.float32)
    close(linear(x.to(device), weight.to(device), tiling=tiling), ref(x, weight), steps=8)


FEW = (2, 3, 7, 8, 9, 15, 16)


@pytest.mark.parametrize("rows", [rows if rows in FEW else pytest.param(rows, marks=pytest.mark.slow) for rows in range(2, 17)])
def test_each_row_is_its_own(rows: int, device: torch.device) -> None:
    """Rows and outputs of whole numbers, which come out exactly, each in its place; what is beside them does not come in."""
    x = torch.zeros(rows + 1, 96)
    x[:-1] = torch.arange(rows * 96).view(rows, 96) % 7 - 3
    x[-1] = torch.nan
    weight = (torch.arange(40 * 96).view(40, 96) % 5 - 2).float()
    for dtype in (torch.float16, torch.float32):
        got = linear(x[:-1].to(device, dtype), weight.to(device, dtype), tiling=LinearTiling(8, 64, 2, 1))
        assert torch.equal(got.cpu().float(), ref(x[:-1], weight))


@pytest.mark.parametrize("rows", [1, 8])
def test_unrounded(rows: int, device: torch.device) -> None:
    """Logits are rounded once: float32 from narrow factors."""
    x, weight, _ = operands(rows, (160, 24), torch.float16)
    got = linear(x.to(device), weight.to(device), out_dtype=torch.float32)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.cpu().double(), ref(x.double(), weight.double()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(1024, 4096), (12288, 1024), (7, 3), (100_000, 1_000_000)], ids=str)
def test_every_size_has_a_tiling(shape: tuple[int, int]) -> None:
    for rows in range(1, MAX_ROWS + 1):
        assert (choose_tiling(rows, *shape).ahead > 0) == (rows > 1)


def test_nothing_to_do(device: torch.device) -> None:
    assert linear(torch.empty(0, 8, device=device), torch.empty(5, 8, device=device)).shape == (0, 5)


def test_what_does_not_fit(device: torch.device) -> None:
    x, weight, _ = (t.to(device) for t in operands(2, (8, 5), torch.float32))
    with pytest.raises(ValueError, match="does not fit"):
        linear(x, weight[:, 1:])
    with pytest.raises(ValueError, match="does not fit"):
        linear(x, weight.half())
    with pytest.raises(ValueError, match="does not fit"):
        linear(x.repeat(MAX_ROWS, 1), weight)
    with pytest.raises(ValueError, match="matrix units"):
        linear(x, weight, tiling=LinearTiling(16, 256, 4, 0))
    with pytest.raises(ValueError, match="contiguous"):
        linear(x.T.contiguous().T, weight)
