"""Products that are summed in splits: by one program or by several, in tiles of any size, bit for bit the same."""

from __future__ import annotations

import itertools

import pytest
import torch

from headrace.kernels.linear.triton_invariant import ONE_TILE, Tile, choose_tile, matmul, splits_of

NARROW, OTHER = Tile(64, 16, 64, 4, 3), Tile(128, 16, 64, 4, 4, 64)


def operands(rows: int, size_in: int, size_out: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(rows, size_in), torch.randn(size_out, size_in) * size_in**-0.5, torch.randn(size_out)
    return x.half().to(device), weight.half().to(device), bias.half().to(device)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("splits", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", [(1, 256, 64), (5, 1000, 200), (35, 520, 130), (3, 33, 7)], ids=str)
def test_shapes(shape: tuple[int, int, int], splits: int, shared: bool, device: torch.device) -> None:
    """Splits may be without channels, and channels and outputs no multiples of a tile's."""
    x, weight, bias = operands(*shape, device)
    got = matmul(x, weight, bias, torch.float32, tile=NARROW, splits=splits, shared=shared)
    wanted = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("splits", [2, 3])
def test_several_programs_sum_as_one_does(splits: int, device: torch.device) -> None:
    """Again and again: what the last program of a tile finds and leaves is in order."""
    x, weight, bias = operands(20, 700, 150, device)
    alone = matmul(x, weight, bias, tile=NARROW, splits=splits, shared=False)
    for _ in range(3 if device.type == "cpu" else 200):
        assert torch.equal(matmul(x, weight, bias, tile=NARROW, splits=splits, shared=True), alone)


def test_the_number_of_splits_is_seen_in_the_result(device: torch.device) -> None:
    """Else the tests above would show nothing."""
    x, weight, _ = operands(20, 700, 150, device)
    one, two = (matmul(x, weight, out_dtype=torch.float32, tile=NARROW, splits=splits) for splits in (1, 2))
    assert not torch.equal(one, two)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("shape", [(4096, 12288), (6144, 4096), (1024, 3072), (1000, 520)], ids=str)
def test_no_tile_is_seen_in_the_result(shape: tuple[int, int]) -> None:
    """The result does not depend on the width of an instruction, whatever the number of rows."""
    size_out, size_in = shape
    x, weight, _ = operands(512, size_in, size_out, torch.device("cuda"))
    wanted = matmul(x, weight)
    tiles = [
        choose_tile(rows, size, splits, x.dtype, x.device)
        for rows in (16, 64, 256, 512)
        for size in (64, 10**6)
        for splits in (1, 2)
    ]
    tiles += [ONE_TILE, OTHER, Tile(64, 8, 128, 4, 4)]
    for tile, shared, rows in itertools.product(tiles, (False, True), (1, 7, 64, 300, 512)):
        assert torch.equal(matmul(x[:rows], weight, tile=tile, shared=shared), wanted[:rows]), (tile, shared, rows)
    for rows in range(1, 513):
        assert torch.equal(matmul(x[:rows], weight), wanted[:rows]), rows


def test_splits_depend_on_the_weight_alone() -> None:
    assert splits_of(4096, 152_000) == 1 < splits_of(12_288, 4096) < splits_of(4096, 1024)
    for size_in, size_out in itertools.product((1, 100, 1024, 12_288), (1, 100, 1024, 152_000)):
        assert 1 <= splits_of(size_in, size_out) <= max(1, size_in // 128)
