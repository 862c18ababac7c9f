"""Products of 65 to 256 rows by the kernel in CUDA C++."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from headrace.kernels import linear as product
from headrace.kernels import support
from headrace.kernels.activation.reference import silu_mul_ref
from headrace.kernels.cuda_launch import CudaKernel
from headrace.kernels.linear import cuda_rows
from headrace.kernels.linear.cuda_rows import MOST_ROWS, RowsTiling, choose, choose_tiling, linear

from .captured import check_captured

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
BF16 = torch.bfloat16
QKV, OUT, GATE_UP, DOWN = (6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)
"""The products of Qwen3 8B, as outputs and inputs."""


def chosen(rows: int) -> list[tuple[RowsTiling, bool]]:
    """The tilings of an 8B on an H200, and whether they are gated."""
    pairs = ((choose_tiling(rows, *size, 132, gated=gated), gated) for size in (QKV, DOWN, GATE_UP) for gated in (False, True))
    return [(tiling, gated) for tiling, gated in pairs if tiling is not None]


def test_kernels_compile(nvrtc: None) -> None:
    for rows, kind in zip((65, 160, 192, MOST_ROWS), itertools.cycle((BF16, torch.float16)), strict=False):
        for tiling, gated in chosen(rows):
            assert cuda_rows._kernel.__wrapped__(tiling, kind, gated).binary().startswith(b"\x7fELF")


@pytest.mark.parametrize("rows", range(65, MOST_ROWS + 1, 17))
def test_rings_have_room(rows: int) -> None:
    """Shared memory of a multiprocessor of Hopper: 228 KB, of which a block takes 1 KB more than it asks for. The sums take the
    rings' place."""
    for tiling, _ in chosen(rows):
        assert rows <= tiling.rows < rows + 32 and tiling.stages >= 4 and tiling.shared + 1024 <= 228 << 10
        assert tiling.rows * 4 * (64 * tiling.groups + 4) <= tiling.shared - 1536
        assert 16 * (tiling.stages + tiling.x_stages) <= 512


def test_which_products_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_rows, "refusals", lambda device: ())
    monkeypatch.setattr(support, "resources", lambda device: SimpleNamespace(multiprocessors=132))
    x, weight = torch.empty(257, 4096, dtype=BF16), torch.empty(QKV, dtype=BF16)
    assert [choose(x[:rows], weight) is not None for rows in (64, 65, 224, 225, 257)] == [False, True, True, False, False]
    assert choose(x[:65].float(), weight.float()) is None and choose(x[:65, :-4], weight[:, :-4]) is None
    assert choose(x[:65], weight[:-8]) is None and choose(x[:65], torch.empty(OUT, dtype=BF16)) is None
    gate_up = torch.empty(GATE_UP, dtype=BF16, device="meta")
    assert choose_tiling(256, *gate_up.shape, 132, gated=True) is not None
    assert choose_tiling(128, *gate_up.shape, 132, gated=False) is None
    down = [choose_tiling(rows, *DOWN, 132, gated=False) is not None for rows in (224, 225, 240, 241, 256)]
    assert down == [True, False, False, True, True]
    monkeypatch.setattr(cuda_rows, "refusals", lambda device: ("it is no Hopper",))
    assert choose(x[:65], weight) is None


@pytest.mark.parametrize("gated", [False, True])
def test_what_the_kernel_is_given(gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[object, ...]] = []
    monkeypatch.setattr(CudaKernel, "launch", lambda self, *arguments: launches.append((self, *arguments)))
    monkeypatch.setattr(cuda_rows, "tensor_map", lambda x, height, width: (tuple(x.shape), x.stride(0), height, width))
    x, weight = torch.ones(70, 1024, dtype=BF16)[:, :520], torch.ones(1008, 520, dtype=BF16)
    y = linear(x, weight, RowsTiling(96, 3, 1, 4) if gated else RowsTiling(96, 1, 2, 5, True), gated=gated)
    ((kernel, grid, *maps, at, rows, out, steps),) = launches
    assert (y.shape, at) == ((70, 504 if gated else 1008), y.data_ptr())
    assert (grid, rows, out, steps) == ((6 if gated else 32, 1, 1), 70, 504 if gated else 1008, 9)
    assert maps == [((1008, 520), 520, 96 if gated else 64, 64), ((70, 520), 1024, 96, 64)]
    assert isinstance(kernel, CudaKernel) and kernel._macros["GATED"] == gated


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("kind", [BF16, torch.float16])
@pytest.mark.parametrize("rows", [65, 96, 97, 128, 150, 192, 224, 256])
def test_shapes(rows: int, kind: torch.dtype) -> None:
    """Channels and outputs are no multiples of a tile's; bitwise the same again."""
    for (tiling, gated), (out, inputs) in itertools.product(chosen(rows), [(1008, 272), (144, 72), (4096, 4096), (400, 12288)]):
        torch.manual_seed(rows)
        x, weight = (torch.randn(size, inputs, device="cuda", dtype=kind) / 8 for size in (rows, out))
        got = linear(x, weight, tiling, gated=gated)
        wanted = x.double() @ weight.double().T
        if gated:
            wanted = silu_mul_ref(wanted.to(kind)).double()
        close = wanted.abs().max().item() * (2e-2 if gated else 5e-3)
        torch.testing.assert_close(got.double(), wanted, atol=close, rtol=0)
        assert torch.equal(linear(x, weight, tiling, gated=gated), got)


@pytest.mark.gpu
@GPU
def test_captured_products() -> None:
    weight = torch.randn(DOWN, device="cuda", dtype=BF16) / 64
    check_captured(100, DOWN[1], lambda x: product.linear(x, weight))
