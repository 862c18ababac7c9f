"""Tests of products of 2 to 64 rows with adapters, which the kernel in CUDA C++ makes in one launch."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from headrace.kernels import linear as product
from headrace.kernels.activation import silu_mul
from headrace.kernels.cuda_launch import CudaKernel
from headrace.kernels.linear import cuda_wide
from headrace.kernels.linear.cuda_wide import CudaTiling
from headrace.kernels.lora import Factors

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
BF16 = torch.bfloat16
TILINGS = [
    (8, CudaTiling(16, 1, 108)),
    (16, CudaTiling(16, 2, 54, 2)),
    (8, CudaTiling(32, 4, 72)),
    (32, CudaTiling(32, 1, 216)),
    (64, CudaTiling(64, 2, 216, 2)),
    (16, CudaTiling(64, 8, 72, 2)),
    (64, CudaTiling(128, 4, 108, 2)),
]
"""Most rows, and tilings of each size."""


def test_kernels_compile(nvrtc: None) -> None:
    for (rows, tiling), kind in itertools.product((*TILINGS, (64, cuda_wide._GATED)), (BF16, torch.float16)):
        kernel = cuda_wide._kernel.__wrapped__(tiling, rows, kind, kind, None, tiling == cuda_wide._GATED, True)
        assert kernel.binary().startswith(b"\x7fELF")


def tables(
    places: int, parts: tuple[int, ...], inputs: int, rank: int, rows: int, kind: torch.dtype = BF16, device: str = "cpu"
) -> Factors:
    """Adapters that lie apart, as they do in an engine, and rows that have none of them."""
    torch.manual_seed(places)
    of_a, of_b = rank * len(parts) * inputs, sum(parts) * rank
    memory = torch.randn(places, of_a + 64 + of_b).to(device, kind)
    memory[:, :of_a] *= inputs**-0.5
    a, b = memory[:, :of_a].view(places, -1, inputs), memory[:, -of_b:].view(places, -1, rank)
    return Factors(a, b, tuple(itertools.accumulate(parts)), (), torch.full((rows,), -1, dtype=torch.int32, device=device))


def test_what_the_kernels_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[object, ...]] = []
    monkeypatch.setattr(CudaKernel, "launch", lambda self, *arguments: launches.append((self, *arguments)))
    monkeypatch.setattr(cuda_wide, "tensor_map", lambda x, height, width: (tuple(x.shape), x.stride(0), height, width))
    monkeypatch.setattr(cuda_wide, "refusals", lambda device: ())
    monkeypatch.setattr(cuda_wide, "choose_tiling", lambda rows, out, multiprocessors, **_: CudaTiling(32, 2, 72))
    x, weight = torch.empty(13, 4096).bfloat16(), torch.empty(6144, 4096).bfloat16()
    factors = tables(3, (4096, 1024, 1024), 4096, 24, 13)
    assert factors.places is not None
    y = product.linear_adapted(x, weight, None, None, factors)
    assert (y.shape, y.dtype) == ((13, 6144), BF16)
    ((kernel, grid, *given),) = launches
    b, *at, x_row, a_place, inputs, rank, parts, end_0, end_1, workers = given[9:]
    assert grid == (384, 1, 1) and b == ((3, 6144, 24), factors.b.stride(0), 32, 16)
    assert at[:3] == [x.data_ptr(), factors.a.data_ptr(), factors.places.data_ptr()]
    assert (x_row, a_place, inputs) == (4096, factors.a.stride(0), 4096)
    assert (rank, parts, end_0, end_1) == (24, 3, 4096, 5120)
    assert workers == 3 * 8, "blocks of eight multiprocessors, which take turns with A"
    assert isinstance(kernel, CudaKernel) and (kernel._macros["ADAPTED"], kernel._macros["RESIDENT"]) == (1, 3)


def test_which_products_add(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are whole tiles, and rows of A and B whole pieces of 16 bytes."""
    made: list[str] = []
    monkeypatch.setattr(CudaKernel, "launch", lambda self, *arguments: made.append(self._name))
    monkeypatch.setattr(cuda_wide, "tensor_map", lambda *arguments: b"")
    monkeypatch.setattr(cuda_wide, "refusals", lambda device: ())

    def added(
        parts: tuple[int, ...] = (128, 64), rank: int = 16, rows: int = 2, places: int = 2, kind: torch.dtype = BF16
    ) -> bool:
        x, weight = torch.empty(rows, 512, dtype=kind), torch.empty(sum(parts), 512, dtype=kind)
        return cuda_wide.adapted(x, weight, None, None, tables(places, parts, 512, rank, rows, kind)) is not None

    assert added() and added(rank=8) and added(rows=64) and added((64,)) and added((64, 64, 3)) and added(places=64)
    assert not (added((24, 40)) or added(rank=4) or added(rows=65) or added((64,) * 4) or added(places=65))
    assert not added(kind=torch.float32) and made == ["wide_product"] * 6
    x, weight = torch.empty(9, 1024).bfloat16(), torch.empty(24576, 1024).bfloat16()
    for parts, taken in (((12288, 12288), True), ((8192, 16384), False)):
        gated = product.linear_adapted_gated(x, weight, tables(1, parts, 1024, 16, 9))
        assert (gated is not None) == taken and (gated is None or gated.shape == (9, 12288))
        assert product.linear_adapted_gated(x, weight, tables(1, parts, 1024, 16, 9), batch_invariant=True) is None


def deals(rows: int, places: int) -> list[torch.Tensor]:
    """Adapters of rows: in turns, all the last, at random, none, and a single row's."""
    row = torch.arange(rows)
    return [
        row % (places + 1) - 1, torch.full((rows,), places - 1), torch.randint(-1, places, (rows,)), torch.full((rows,), -1),
        torch.where(row == rows - 1, 0, -1),
    ]  # fmt: skip


def expected(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, factors: Factors) -> torch.Tensor:
    """The products in float64, except that those of A are rounded as the kernel rounds them."""
    wanted, held, rank = x.double() @ weight.double().t(), factors.places, factors.b.shape[2]
    assert held is not None
    wanted += 0 if bias is None else bias.double()
    for place in range(len(factors.a)):
        mine, first = held == place, 0
        for part, end in enumerate(factors.ends):
            low = x[mine].double() @ factors.a[place, part * rank : (part + 1) * rank].double().t()
            wanted[mine, first:end] += low.to(x.dtype).double() @ factors.b[place, first:end].double().t()
            first = end
    return wanted


def check(
    run: Callable[[], torch.Tensor],
    factors: Factors,
    wanted: Callable[[], torch.Tensor],
    base: torch.Tensor | None,
    error: float,
) -> None:
    """Results are near to float64, the same again and in a graph that was captured with other adapters, and rows without an
    adapter are those of the base, bit by bit."""
    held = factors.places
    assert held is not None
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [run() for _ in range(3)]
    for dealt in deals(len(held), len(factors.a)):
        held.copy_(dealt)
        got, exact = run(), wanted()
        assert (got.double() - exact).abs().max() < error * exact.abs().max()
        graph.replay()
        assert all(torch.equal(got, other) for other in (run(), *captured))
        assert base is None or torch.equal(got[held < 0], base[held < 0])


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(("most", "tiling"), TILINGS, ids=str)
@pytest.mark.parametrize(("places", "rank", "kind"), [(3, 8, BF16), (8, 24, torch.float16), (40, 64, BF16)])
def test_shapes(most: int, tiling: CudaTiling, places: int, rank: int, kind: torch.dtype) -> None:
    for parts, inputs, rows in (((256, 128, 77), 520, most), ((384,), 8, most // 2 + 1), ((128, 130), 2568, 2)):
        factors = tables(places, parts, inputs, rank, rows, kind, "cuda")
        x = torch.randn(rows, inputs, device="cuda").to(kind)
        weight = (inputs**-0.5 * torch.randn(sum(parts), inputs, device="cuda")).to(kind)
        bias = torch.randn(sum(parts), device="cuda").to(kind)

        def run(
            x: torch.Tensor = x, weight: torch.Tensor = weight, bias: torch.Tensor = bias, factors: Factors = factors
        ) -> torch.Tensor:
            return cuda_wide.linear(x, weight, bias, torch.float32, tiling=tiling, added=factors)

        base = cuda_wide.linear(x, weight, bias, torch.float32, tiling=tiling)
        check(run, factors, lambda: expected(x, weight, bias, factors), base, 2e-3)  # noqa: B023


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("rows", [2, 8, 29, 64])
@pytest.mark.parametrize("parts", [(4096, 1024, 1024), (4096,), (12288, 12288)], ids=str)
def test_products_of_a_layer(parts: tuple[int, ...], rows: int) -> None:
    inputs, gated = 12288 if len(parts) == 1 else 4096, len(parts) == 2
    factors = tables(8, parts, inputs, 16, rows, BF16, "cuda")
    x = torch.randn(rows, inputs, device="cuda", dtype=BF16)
    weight = (inputs**-0.5 * torch.randn(sum(parts), inputs, device="cuda")).to(BF16)

    def run() -> torch.Tensor:
        if not gated:
            return product.linear_adapted(x, weight, None, None, factors)
        y = product.linear_adapted_gated(x, weight, factors)
        assert y is not None
        return y

    def wanted() -> torch.Tensor:
        exact = expected(x, weight, None, factors)
        return silu_mul(exact.to(BF16)).double() if gated else exact

    base = product.linear_gated(x, weight) if gated else product.linear(x, weight)
    check(run, factors, wanted, base, 1.2e-2)
