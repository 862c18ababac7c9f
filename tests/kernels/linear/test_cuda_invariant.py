"""Batch-invariant products by the kernels in CUDA C++: bit for bit Triton's, whatever the number of rows."""

from __future__ import annotations

import itertools

import pytest
import torch

from headrace.kernels import support
from headrace.kernels.activation import silu_mul
from headrace.kernels.cuda_launch import CudaKernel
from headrace.kernels.linear import cuda_rows, cuda_wide, fp8, triton_invariant
from headrace.kernels.linear.cuda_invariant import choose_fp8, choose_rows, choose_wide, gated, linear
from headrace.kernels.linear.cuda_rows import MOST_ROWS, RowsTiling
from headrace.kernels.linear.cuda_wide import CudaTiling
from headrace.kernels.linear.fp8_reference import Fp8Weight
from headrace.kernels.linear.fp8_tilings import INVARIANT
from headrace.kernels.linear.splits import span_of, splits_of
from headrace.kernels.linear.triton_fp8_wide import wide

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
BF16 = torch.bfloat16
SHAPES = ((6144, 4096), (4096, 12288), (24576, 4096), (2560, 9728), (1008, 520))


def test_kernels_compile(nvrtc: None) -> None:
    for rows, splits in itertools.product((1, 16, 32, 64), (1, 2, 3, 4)):
        tiling = choose_wide(rows, 4096, splits, 132)
        assert tiling is not None and tiling.split * tiling.fold == splits
        kernel = cuda_wide._kernel.__wrapped__(tiling, max(8, rows), BF16, BF16, None, False, False, True)
        assert kernel.binary().startswith(b"\x7fELF")
    for rows in (65, MOST_ROWS):
        more = choose_rows(rows, 4096, 2048, 4, 132)
        assert more is not None and cuda_rows._kernel.__wrapped__(more, BF16, False).binary().startswith(b"\x7fELF")


def test_which_tilings_there_are() -> None:
    """Those of Qwen3 8B on an H200."""
    assert choose_wide(32, 4096, 2, 132) == CudaTiling(32, 1, 216, 2) and choose_wide(33, 4096, 2, 132) == CudaTiling(
        64, 2, 216, 2
    )
    assert choose_wide(1, 6144, 1, 132) == CudaTiling(64, 1, 216, 2) and choose_wide(1, 152_000, 1, 132) == CudaTiling(
        64, 1, 72
    )
    assert choose_wide(1, 1024, 9, 132) is None
    assert choose_rows(65, 12288, 4096, 2, 132) == RowsTiling(96, 1, 2, 5, True)
    assert choose_rows(256, 4096, 152_000, 1, 132) == RowsTiling(256, 3, 1, 3, registers=160)
    assert choose_rows(65, 12288 + 128, 4096, 2, 132) is None, "splits are no equal shares"
    assert choose_rows(65, 4096, 2560, 3, 132) is None and choose_rows(65, 4096, 5120, 2, 132) is None


@pytest.mark.parametrize("inputs", [72, 520, 4096, 12288, 9728, 1032])
def test_splits_are_whole_steps(inputs: int) -> None:
    for splits in (1, 2, 3, 4):
        span = span_of(inputs, splits)
        assert not span % 128 and (splits - 1) * span < inputs + splits * 128 and splits * span >= inputs


def test_what_the_kernels_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a split, not of all channels."""
    given: list[tuple[object, ...]] = []
    monkeypatch.setattr(CudaKernel, "launch", lambda self, grid, *arguments: given.append((self, grid, arguments[-1])))
    for module in (cuda_wide, cuda_rows):
        monkeypatch.setattr(module, "tensor_map", lambda *arguments: arguments)
        monkeypatch.setattr(module, "refusals", lambda device: ())
    monkeypatch.setattr(support, "resources", lambda device: support.Resources(132, 227 << 10))
    weight = torch.zeros(4096, 1208, dtype=BF16)
    assert splits_of(1208, 4096) == 2 and span_of(1208, 2) == 640
    for rows, grid, steps in ((1, 128, 5), (64, 128, 5)):
        assert linear(torch.zeros(rows, 1208, dtype=BF16), weight, None, None) is not None
        kernel, blocks, count = given.pop()
        assert isinstance(kernel, CudaKernel) and (kernel._macros["ORDERED"], blocks, count) == (1, (grid, 1, 1), steps)
    x = torch.zeros(MOST_ROWS + 1, 1208, dtype=BF16)
    assert linear(x, weight, None, None) is None and linear(x[:0], weight, None, None) is None
    assert linear(x[:5].half(), weight.half(), None, None) is None and linear(x[:5, :-4], weight[:, :-4], None, None) is None
    x, weight = torch.zeros(65, 1280, dtype=BF16), torch.zeros(4096, 1280, dtype=BF16)
    assert linear(x, weight, None, None) is not None and linear(x, weight, None, torch.float32) is None
    assert linear(x, weight, weight[:, 0], None) is None
    assert gated(x[:5], weight) is None, "of channels in splits, gate and up are not made at once"


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_those_of_the_other_kernel(shape: tuple[int, int]) -> None:
    outputs, inputs = shape
    torch.manual_seed(outputs)
    x, weight = torch.randn(512, inputs, device="cuda", dtype=BF16), torch.randn(shape, device="cuda", dtype=BF16) / 64
    bias = torch.randn(outputs, device="cuda", dtype=BF16)
    wanted = triton_invariant.matmul(x, weight)
    activated = silu_mul(wanted) if not outputs % 2 else None
    for rows in range(1, MOST_ROWS + 1):
        got = linear(x[:rows], weight, None, None)
        assert got is None or torch.equal(got, wanted[:rows]), rows
        assert rows > 64 or got is not None
        both = gated(x[-rows:], weight)
        assert both is None or (activated is not None and torch.equal(both, activated[-rows:])), rows
    for rows, kind in itertools.product((1, 9, 40, 64), (BF16, torch.float32)):
        got = linear(x[:rows], weight, bias, kind)
        assert got is not None and torch.equal(got, triton_invariant.matmul(x[:rows], weight, bias, kind)), (rows, kind)
    tall = gated(x, weight)
    assert tall is None or (activated is not None and torch.equal(tall, activated))
    assert (tall is None) == (shape != (24576, 4096))
    torch.testing.assert_close(wanted.double(), x.double() @ weight.double().T, atol=5e-2, rtol=2e-2)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("shape", [(4096, 12288), (24576, 4096), (1008, 528)], ids=str)
def test_fp8_has_the_bits_of_the_other_kernel(shape: tuple[int, int]) -> None:
    outputs, inputs = shape
    torch.manual_seed(outputs)
    codes, scales = (torch.randn(shape, device="cuda") * 4).to(torch.float8_e4m3fn), torch.rand(outputs, 1, device="cuda")
    one, turns = torch.ones((), device="cuda"), torch.zeros(outputs // 64 + 1, dtype=torch.int32, device="cuda")
    weight, x = (
        Fp8Weight(codes, scales, one, turns),
        fp8.round_rows(torch.randn(100, inputs, device="cuda", dtype=BF16), inputs),
    )
    wanted = wide(x, weight, None, BF16, INVARIANT)
    for rows in range(1, 100):
        some = x._replace(codes=x.codes[:rows], scales=x.scales[:rows], rows=rows)
        assert (choose_fp8(some.codes, codes) is not None) == (rows <= 64)
        assert torch.equal(fp8.fp8_linear(some, weight, batch_invariant=True), wanted[:rows]), rows
