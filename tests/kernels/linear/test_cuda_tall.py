"""Products of many rows by the kernel in CUDA C++: gate and up, and those that adapters add to."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels import linear as product
from headrace.kernels import support
from headrace.kernels.activation import silu_mul
from headrace.kernels.cuda_launch import CudaKernel
from headrace.kernels.linear import cuda_tall

from .captured import check_captured
from .test_cuda_adapted import deals, expected, tables

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
BF16 = torch.bfloat16


@pytest.mark.parametrize("kind", [BF16, torch.float16])
@pytest.mark.parametrize(("gated", "adapted"), [(True, False), (True, True), (False, True)])
def test_kernels_compile(kind: torch.dtype, gated: bool, adapted: bool, nvrtc: None) -> None:
    kernel = cuda_tall._kernel.__wrapped__(kind, gated, adapted)
    assert f".text.{kernel._name}\0".encode() in kernel.binary()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Replaces the compiled kernels by a recorder on a machine that claims to have an H200, and returns the launches."""
    launches: list[tuple[object, ...]] = []
    monkeypatch.setattr(CudaKernel, "launch", lambda self, *arguments: launches.append((self, *arguments)))
    monkeypatch.setattr(cuda_tall, "tensor_map", lambda x, height, width: (tuple(x.shape), x.stride(0), height, width))
    monkeypatch.setattr(cuda_tall, "shrink_rounded", lambda x, a, places: x.new_empty(len(x), a.shape[1]))
    monkeypatch.setattr(cuda_tall, "refusals", lambda device: ())
    monkeypatch.setattr(support, "resources", lambda device: support.Resources(132, 232_448))
    return launches


def test_what_the_kernel_is_given(launches: list[tuple[object, ...]]) -> None:
    """No more pairs of blocks than there are tiles, and parts of wider tensors have their strides."""
    x, weight = torch.empty(1024, 1000, dtype=BF16)[:, :520], torch.empty(6336, 520, dtype=BF16)
    y = cuda_tall.gated(x, weight)
    assert y is not None and (y.shape, y.dtype) == ((1024, 3168), BF16)
    ((kernel, grid, *maps, at, rows, out, steps, _),) = launches
    assert isinstance(kernel, CudaKernel) and (grid, at, rows, out, steps) == ((132, 1, 1), y.data_ptr(), 1024, 3168, 9)
    assert maps == [((1024, 520), 1000, 256, 64), ((6336, 520), 520, 96, 64)]
    cuda_tall.gated(torch.empty(15_360, 8, dtype=BF16), torch.empty(576, 8, dtype=BF16))
    assert launches[-1][1] == (132, 1, 1)


@pytest.mark.parametrize(("rows", "lines", "inputs", "taken"), [
    (0, 24_576, 4096, False), (256, 24_576, 4096, False), (512, 24_576, 4096, True), (768, 24_576, 4096, False),
    (1024, 24_576, 4096, True), (3000, 24_576, 4096, True), (16_384, 24_576, 4096, True), (512, 28_672, 5120, False),
    (2048, 28_672, 5120, False), (8192, 28_672, 5120, True), (4096, 6144, 1024, True), (1024, 24_568, 4096, False),
    (1024, 24_576, 4092, False),
])  # fmt: skip
def test_products_that_it_has(rows: int, lines: int, inputs: int, taken: bool, launches: list[tuple[object, ...]]) -> None:
    """Those that it was measured to make faster on an H200, of whole pieces of 16 bytes."""
    x, weight = torch.empty(rows, inputs, dtype=BF16), torch.empty(lines, inputs, dtype=BF16)
    assert (cuda_tall.gated(x, weight) is not None) is taken is bool(launches)
    assert cuda_tall.gated(x.float(), weight.float()) is None


def test_what_it_is_given_of_adapters(launches: list[tuple[object, ...]]) -> None:
    """Parts end where tiles do: q, k and v in tiles of 256 lines, gate and up in tiles of 96 of each."""
    x, weight = torch.empty(8192, 4096, dtype=BF16), torch.empty(6144, 4096, dtype=BF16)
    factors = tables(3, (4096, 1024, 1024), 4096, 24, 8192)
    assert factors.places is not None
    y = product.linear_adapted(x, weight, None, None, factors)
    ((kernel, grid, *given),) = launches
    assert isinstance(kernel, CudaKernel) and (kernel._macros["GATED"], kernel._macros["ADAPTED"]) == (0, 1)
    assert (grid, given[:3]) == ((132, 1, 1), [((8192, 4096), 4096, 128, 64), ((6144, 4096), 4096, 128, 64), y.data_ptr()])
    assert given[7] == ((3, 6144, 24), factors.b.stride(0), 128, 16)
    assert given[9:] == [factors.places.data_ptr(), 24, 3, 4096, 5120]
    weight = torch.empty(24_576, 4096, dtype=BF16)
    gated = product.linear_adapted_gated(x, weight, tables(1, (12_288, 12_288), 4096, 16, 8192))
    assert gated is not None and gated.shape == (8192, 12_288)
    kernel, _, _, weights, *given = launches[-1]
    assert isinstance(kernel, CudaKernel) and (kernel._macros["GATED"], kernel._macros["ADAPTED"]) == (1, 1)
    assert weights == ((24_576, 4096), 4096, 96, 64) and given[8:] == [16, 2, 12_288, 24_576]


def test_which_adapters_it_adds(launches: list[tuple[object, ...]]) -> None:
    def taken(
        parts: tuple[int, ...], rank: int = 16, places: int = 1, rows: int = 8192, inputs: int = 64, kind: torch.dtype = BF16
    ) -> bool:
        x, weight = torch.empty(rows, inputs, dtype=kind), torch.empty(sum(parts), inputs, dtype=kind)
        return cuda_tall.adapted(x, weight, tables(places, parts, inputs, rank, rows, kind)) is not None

    assert taken((4096, 1024, 1024)) and taken((4096,), 8, 64) and taken((4096, 2000))
    assert not (taken((4000, 2096)) or taken((4096,), 4) or taken((4096,), places=65) or taken((4096,), kind=torch.float32))
    assert not (taken((4096,), rows=2048) or taken((1024,), rows=2600) or taken((1024,) * 4) or len(launches) != 3)


def test_other_devices() -> None:
    x, weight = torch.empty(1024, 4096, dtype=BF16), torch.empty(24_576, 4096, dtype=BF16)
    assert cuda_tall.gated(x, weight) is None


def operands(rows: int, inputs: int, lines: int, kind: torch.dtype = BF16) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows)
    x, weight = torch.randn(rows, inputs), torch.randn(lines, inputs) * inputs**-0.5
    return x.to("cuda", kind), weight.to("cuda", kind)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("kind", [BF16, torch.float16])
@pytest.mark.parametrize(("rows", "inputs", "lines"), [
    (1, 8, 16), (257, 520, 208), (700, 64, 400), (2085, 1088, 1280), (5000, 1024, 6144), (4096, 4096, 24_576),
])  # fmt: skip
def test_shapes(rows: int, inputs: int, lines: int, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded where the product and the activation are; tiles that are whole and that are not; the same again and again."""
    monkeypatch.setattr(cuda_tall, "_FILLED", 0.0)
    x, weight = operands(rows, inputs, lines, kind)
    got = cuda_tall.gated(x, weight)
    wanted = silu_mul((x.double() @ weight.double().t()).to(kind))
    assert got is not None
    torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2)
    for _ in range(3):
        again = cuda_tall.gated(x, weight)
        assert again is not None and torch.equal(again, got)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(("parts", "rows", "inputs", "places", "rank", "kind"), [
    ((512, 256, 240), 1, 8, 3, 8, BF16), ((512, 256, 240), 2085, 1088, 8, 16, BF16), ((1024,), 257, 520, 40, 24, torch.float16),
    ((208, 208), 1, 8, 3, 8, BF16), ((208, 208), 700, 64, 40, 24, torch.float16), ((3072, 3072), 2085, 1088, 8, 16, BF16),
    ((3072, 3072), 2085, 1088, 64, 64, BF16),
])  # fmt: skip
def test_adapters(
    parts: tuple[int, ...], rows: int, inputs: int, places: int, rank: int, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows have any adapters; those without one come out as they do without adapters, bit by bit."""
    monkeypatch.setattr(cuda_tall, "_FILLED_ADAPTED", (0.0, 0.0))
    monkeypatch.setattr(cuda_tall, "_FEW_ROWS", 0)
    factors, (x, weight) = tables(places, parts, inputs, rank, rows, kind, "cuda"), operands(rows, inputs, sum(parts), kind)
    gated = len(parts) == 2
    run, base, row = (
        (cuda_tall.adapted_gated if gated else cuda_tall.adapted),
        cuda_tall._product(x, weight, gated),
        torch.arange(rows),
    )
    runs, held = row // 100 % (places + 1) - 1, factors.places
    assert held is not None
    for dealt in (*deals(rows, places), runs):
        held.copy_(dealt)
        got, wanted = run(x, weight, factors), expected(x, weight, None, factors)
        assert got is not None
        wanted = silu_mul(wanted.to(kind)).double() if gated else wanted
        assert (got.double() - wanted).abs().max() < 1.2e-2 * wanted.abs().max()
        again = run(x, weight, factors)
        assert again is not None and torch.equal(got, again)
        assert torch.equal(got[dealt < 0], base[dealt < 0])


@pytest.mark.gpu
@GPU
def test_parts_of_wider_tensors() -> None:
    wide, weight = operands(1024, 2048, 24_576)
    x, weight = wide[:, 128:1152], weight[:, 512:1536]
    got = product.linear_gated(x, weight)
    assert got is not None
    torch.testing.assert_close(got, silu_mul((x.double() @ weight.double().t()).to(BF16)), atol=2e-2, rtol=2e-2)


@pytest.mark.gpu
@GPU
def test_captured() -> None:
    """Products behind each other, of which each begins before the one before is complete."""
    first, second = operands(2, 1024, 6144)[1], operands(3, 3072, 2048)[1]

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            gated = product.linear_gated(x, first)
            assert gated is not None
            x = product.linear(gated, second)[:, :1024].contiguous()
        return x

    check_captured(1024, 1024, chain)
