"""Gate and up of many rows by the kernel in CUDA C++."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels import linear as product
from headrace.kernels import support
from headrace.kernels.activation import silu_mul
from headrace.kernels.cuda_launch import CudaKernel
from headrace.kernels.linear import cuda_tall

from .captured import check_captured

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
BF16 = torch.bfloat16


@pytest.mark.parametrize("kind", [BF16, torch.float16])
def test_kernels_compile(kind: torch.dtype, nvrtc: None) -> None:
    kernel = cuda_tall._kernel.__wrapped__(kind)
    assert f".text.{kernel._name}\0".encode() in kernel.binary()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Replaces the compiled kernels by a recorder on a machine that claims to have an H200, and returns the launches."""
    launches: list[tuple[object, ...]] = []
    monkeypatch.setattr(CudaKernel, "launch", lambda self, *arguments: launches.append((self, *arguments)))
    monkeypatch.setattr(cuda_tall, "tensor_map", lambda x, height, width: (tuple(x.shape), x.stride(0), height, width))
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
