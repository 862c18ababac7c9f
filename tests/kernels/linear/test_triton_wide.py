"""Products of some rows with a large weight: any shape, in tiles and splits of any size."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.linear.triton_wide import SplitTiling, choose_tiling, linear, takes


def operands(rows: int, size_in: int, size_out: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows)
    x, weight, bias = torch.randn(rows, size_in), torch.randn(size_out, size_in) * size_in**-0.5, torch.randn(size_out)
    return x.half().to(device), weight.half().to(device), bias.half().to(device)


@pytest.mark.parametrize("tiling", [SplitTiling(16, 64, 3, 1), SplitTiling(16, 128, 2, 2), SplitTiling(32, 64, 2, 3)], ids=str)
@pytest.mark.parametrize("shape", [(2, 256, 64), (13, 1000, 200), (16, 520, 130)], ids=str)
def test_shapes(shape: tuple[int, int, int], tiling: SplitTiling, device: torch.device) -> None:
    """Channels and outputs are no multiples of a tile's, and splits have different numbers of steps."""
    x, weight, bias = operands(*shape, device)
    got = linear(x, weight, bias, torch.float32, tiling)
    wanted = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(got.double(), wanted, atol=1e-5, rtol=1e-5)


def test_parts_of_wider_tensors(device: torch.device) -> None:
    x, weight, _ = operands(5, 512, 300, device)
    got = linear(x[:, 128:384], weight[40:140, 128:384], tiling=SplitTiling(16, 64, 2, 2))
    wanted = torch.nn.functional.linear(x[:, 128:384].double(), weight[40:140, 128:384].double())
    torch.testing.assert_close(got.double(), wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("shape", [(4096, 4096), (12288, 4096), (4096, 6144), (4096, 12352), (4096, 24576)], ids=str)
@pytest.mark.parametrize("rows", [2, 16, 17, 64])
def test_chosen_tilings(shape: tuple[int, int], rows: int) -> None:
    """Again and again: what the last program of a tile finds and leaves is in order."""
    x, weight, bias = operands(rows, *shape, torch.device("cuda"))
    wanted = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    for _ in range(20):
        torch.testing.assert_close(linear(x, weight, bias, torch.float32).double(), wanted, atol=1e-4, rtol=1e-4)


def test_every_size_has_a_tiling() -> None:
    for rows in range(2, 65):
        for size_out in (64, 1024, 4096, 6144, 8448, 24576, 248320):
            tiling = choose_tiling(rows, size_out)
            assert rows <= tiling.rows and tiling.stages * (tiling.rows + 64) * tiling.channels * 2 <= 227 << 10


def test_which_factors_it_takes() -> None:
    """Those whose rows begin at multiples of 16 bytes."""
    x, weight = torch.empty(2, 512).bfloat16(), torch.empty(64, 512).bfloat16()
    assert takes(x, weight) and takes(x[:, 8:], weight[:, 8:])
    assert not takes(x[:, 1:], weight[:, 1:]) and not takes(x.float(), weight.float()) and not takes(x[:, :8], weight[:, :8])
