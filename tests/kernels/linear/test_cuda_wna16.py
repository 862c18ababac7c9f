"""Products with weights of 4 bits by the kernel in CUDA C++."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from headrace.kernels import support
from headrace.kernels.activation.reference import silu_mul_ref
from headrace.kernels.cuda_launch import CudaKernel
from headrace.kernels.linear import cuda_wna16
from headrace.kernels.linear.cuda_wna16 import (
    EXACT_ROWS,
    MAX_ROWS,
    CudaPackedTiling,
    _choose,
    choose,
    few_gated,
    gates_few,
    linear,
    takes,
)
from headrace.kernels.linear.wna16 import wna16_gated, wna16_linear
from headrace.kernels.linear.wna16_reference import PackedWeight
from headrace.kernels.support import Resources

from .captured import check_captured
from .packed import packed_weight

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
BF16, HALF = torch.bfloat16, torch.float16
QWEN3_8B = {(6144, 4096): False, (4096, 4096): False, (24576, 4096): True, (4096, 12288): False}
"""Outputs and inputs, and whether the first half of the outputs gates the second."""


def empty_weight(outputs: int, inputs: int, group: int = 128, *, bits: int = 4, scales: torch.dtype = BF16) -> PackedWeight:
    words = torch.empty(-(-outputs // 8), -(-inputs // 128), bits // 4, 8, 16, dtype=torch.int32, device="meta")
    factors = torch.empty(-(-inputs // group), outputs, dtype=scales, device="meta")
    return PackedWeight(words, factors, None, group, inputs, torch.empty(1, device="meta"))


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends that the kernels run here, on an H200."""
    monkeypatch.setattr(cuda_wna16, "refusals", lambda device: ())
    monkeypatch.setattr(support, "resources", lambda device: Resources(132, 227 << 10))


def test_kernels_compile(nvrtc: None) -> None:
    for tiling, kind, scales, middles, gated in [
        (CudaPackedTiling(24, 2, 2, deferred=True), BF16, BF16, False, True),
        (CudaPackedTiling(16, 3, 4, 8), HALF, HALF, True, False),
        (CudaPackedTiling(128, 2), BF16, HALF, False, True),
    ]:
        kernel = cuda_wna16._kernel.__wrapped__(tiling, 32, kind, scales, middles, gated)
        assert kernel.binary().startswith(b"\x7fELF")
    for runs, kind in (9, HALF), (32, BF16), (40, BF16):
        assert cuda_wna16._few_kernel.__wrapped__(runs, 1, kind, BF16)[0].binary().startswith(b"\x7fELF")


def chosen(rows: int, outputs: int, inputs: int, *, gated: bool = False) -> CudaPackedTiling | None:
    return choose(torch.empty(rows, inputs, dtype=BF16), empty_weight(outputs, inputs), gated=gated)


@pytest.mark.usefixtures("on_hopper")
def test_chosen_tilings_fit() -> None:
    """Shared memory of a block of Hopper; clusters that any Hopper GPU takes; registers of three teams."""
    sizes = [*QWEN3_8B, (64, 128), (100, 1000), (2048, 2048), (5120, 25600), (151936, 4096), (8192, 28672)]
    for (outputs, inputs), rows in itertools.product(sizes, (9, 17, 33, 64, 65, 200, MAX_ROWS)):
        tiling = chosen(rows, outputs, inputs)
        assert tiling is not None
        runs = -(-inputs // 128)
        assert tiling.parts <= min(8, runs) and tiling.stages >= 4
        assert rows <= tiling.rows or tiling.rows >= 64
        assert rows > EXACT_ROWS or not tiling.rounded
        assert not (tiling.deferred and tiling.teams == 3 and tiling.rows > 16)
        assert tiling.shared(runs, False) <= 227 << 10
        assert outputs > 8192 or _choose(rows, outputs, runs, True, False, False, 132) is not None


@pytest.mark.usefixtures("on_hopper")
def test_what_is_left_to_other_kernels() -> None:
    """Few rows and very many; outputs that do not halve within a block where it gates."""
    assert [chosen(rows, 4096, 4096) is not None for rows in (8, 9, MAX_ROWS, MAX_ROWS + 1)] == [False, True, True, False]
    assert chosen(16, 24576, 4096, gated=True) == chosen(16, 24576, 4096)
    assert chosen(16, 24512, 4096) is not None and chosen(16, 24512, 4096, gated=True) is None


@pytest.mark.usefixtures("on_hopper")
def test_weights_are_rounded_for_many_rows_in_bfloat16_alone() -> None:
    assert [tiling and tiling.rounded for tiling in (chosen(64, 24576, 4096), chosen(65, 24576, 4096))] == [False, True]
    x, weight = torch.empty(128, 4096, dtype=BF16), empty_weight(24576, 4096)
    shifted = weight._replace(middles=torch.empty(32, 24576, device="meta"))
    for left, right in (x.half(), weight), (x, empty_weight(24576, 4096, scales=HALF)), (x, shifted):
        tiling = choose(left, right)
        assert tiling is not None and not tiling.rounded


def test_which_products_it_takes(monkeypatch: pytest.MonkeyPatch, on_hopper: None) -> None:
    x, weight = torch.empty(65, 1024, dtype=BF16), empty_weight(512, 512)
    assert [takes(x[:rows, :512], weight) for rows in (0, 1, 65)] == [False, True, True]
    assert takes(x[:2, 8:520], weight) and not takes(x[:2, 4:516], weight)
    assert not takes(x[:2, :508], empty_weight(512, 508))
    assert takes(x[:2, :512].half(), weight) and not takes(x[:2, :512].float(), weight)
    assert takes(x[:2, :512], empty_weight(512, 512, 256, scales=HALF))
    for other in (empty_weight(512, 512, 64), empty_weight(512, 512, bits=8), empty_weight(512, 512, scales=torch.float32)):
        assert not takes(x[:2, :512], other)
    assert not takes(x[:2, :512], weight, torch.ones(512)) and takes(x[:2, :512], weight, torch.ones(512, dtype=BF16))
    monkeypatch.setattr(cuda_wna16, "refusals", lambda device: ("it is no Hopper",))
    assert not takes(x[:2, :512], weight)


def test_what_the_kernel_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[Any, ...]] = []
    monkeypatch.setattr(CudaKernel, "launch", lambda self, *arguments: launches.append((self, *arguments)))
    monkeypatch.setattr(cuda_wna16, "tensor_map", lambda x, *tile: (tuple(x.shape), x.stride(0), *tile))
    weight, _ = packed_weight(200, 520, 4, 256, middles=True)
    x, bias, tiling = torch.ones(33, 1024, dtype=HALF)[:, :520], torch.ones(200, dtype=HALF), CudaPackedTiling(16, 2, 3, 4)
    y = linear(x, weight, bias, tiling)
    gates = linear(x, weight._replace(middles=None), None, tiling, gated=True)
    assert (y.shape, gates.shape, y.dtype) == ((33, 200), (33, 100), HALF)
    (kernel, grid, *maps, given), (gating, _, *others) = ((*launch[:4], launch[4:]) for launch in launches)
    assert weight.middles is not None and grid == (3, 2, 3)
    assert maps == [((33, 520), 1024, 16, 64), ((25, 20, 32), 640, 16, 4, 32)]
    pointers = [tensor.data_ptr() for tensor in (weight.scales, weight.middles, bias, y)]
    assert given == (*pointers, 33, 200, 520, 256)
    assert others[1][2:] == (8, 4, 32) and others[2][1:4] == (0, 0, gates.data_ptr())
    assert isinstance(kernel, CudaKernel) and isinstance(gating, CudaKernel)
    shape = {"FEW": 0, "ROWS": 16, "TEAMS": 2, "PARTS": 3, "STAGES": 4, "DEFERRED": 0, "ROUNDED": 0}
    assert kernel._macros == shape | {"HALF": 1, "HALF_SCALES": 1, "MIDDLES": 1, "GATED": 0}
    assert gating._macros == shape | {"HALF": 1, "HALF_SCALES": 1, "MIDDLES": 0, "GATED": 1}


@pytest.mark.usefixtures("on_hopper")
def test_which_gates_of_few_rows_it_has() -> None:
    x, weight = torch.empty(9, 4096, dtype=BF16), empty_weight(24576, 4096)
    assert [gates_few(x[:rows], weight) for rows in (0, 1, 8, 9)] == [False, True, True, False]
    assert gates_few(x[:1].half(), weight) and gates_few(x[:1], empty_weight(24576, 4096, 256))
    others = empty_weight(24572, 4096), empty_weight(8192, 4096), empty_weight(24576, 4096, bits=8)
    assert not any(
        gates_few(x[:1], other) for other in (*others, weight._replace(middles=torch.empty(32, 24576, device="meta")))
    )


def test_what_the_kernel_for_few_rows_is_given(monkeypatch: pytest.MonkeyPatch, on_hopper: None) -> None:
    launches: list[tuple[Any, ...]] = []
    monkeypatch.setattr(CudaKernel, "launch", lambda self, *arguments: launches.append((self, *arguments)))
    monkeypatch.setattr(cuda_wna16, "tensor_map", lambda x, *tile: (x.data_ptr(), *tile))
    weight, _ = packed_weight(208, 1032, 4, 256)
    x = torch.ones(3, 2048, dtype=HALF)[:, :1032]
    y = few_gated(x, weight)
    ((kernel, grid, *given),) = launches
    assert grid == (13, 1, 1) and given[2] == (weight.scales.data_ptr(), 5, 8)
    assert (y.shape, y.dtype) == ((3, 104), HALF)
    assert (*given[:2], *given[3:]) == (x.data_ptr(), weight.words.data_ptr(), y.data_ptr(), 3, 208, 1032, 2048)
    assert kernel._macros == {"FEW": 9, "WARPS": 4, "GROUP_RUNS": 2, "STAGES": 8, "HALF": 1, "HALF_SCALES": 1}


@pytest.mark.parametrize("runs", [1, 9, 32, 33, 64])
def test_blocks_for_few_rows_fit(runs: int) -> None:
    kernel, places = cuda_wna16._few_kernel.__wrapped__(runs, 1, BF16, BF16)
    threads, _, _, shared = kernel._block
    assert threads <= 512 and places * (shared + 1024) <= 228 << 10 and kernel._macros["STAGES"] >= 2


CASES = [
    (CudaPackedTiling(16, 2, 3, deferred=True), BF16, BF16, 128, False, (1, 16)),
    (CudaPackedTiling(16, 3, 4, 8, True), HALF, BF16, 128, False, (9,)),
    (CudaPackedTiling(24, 3, 8, 4), HALF, HALF, 256, True, (17, 50)),
    (CudaPackedTiling(32, 2, 2, 3), BF16, HALF, 128, True, (32,)),
    (CudaPackedTiling(48, 3, 1, 7), BF16, BF16, 128, True, (33, 48)),
    (CudaPackedTiling(64, 2, 1, 4, True), BF16, BF16, 128, False, (64, 129)),
    (CudaPackedTiling(128, 2, 4), HALF, BF16, 128, False, (200,)),
    (CudaPackedTiling(64, 3, 2), BF16, BF16, 128, True, (65,)),
    (CudaPackedTiling(128, 3, 2, 4, rounded=True), BF16, BF16, 128, False, (97, 130)),
    (CudaPackedTiling(96, 3, 1, 4, rounded=True), BF16, BF16, 256, False, (96,)),
]
"""Tilings, dtypes of x and of scales, the group, whether there are zero points, and rows."""


def close(got: torch.Tensor, expected: torch.Tensor, sizes: torch.Tensor) -> bool:
    """Within the rounding of the result, and the error of a sum over the sum of its terms' sizes."""
    unit = torch.finfo(got.dtype).eps / 2
    return bool(((got.double() - expected).abs() <= 1.01 * unit * expected.abs() + 2.0**-18 * sizes).all())


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(("tiling", "kind", "scales", "group", "middles", "counts"), CASES, ids=str)
def test_shapes(
    tiling: CudaPackedTiling, kind: torch.dtype, scales: torch.dtype, group: int, middles: bool, counts: tuple[int, ...]
) -> None:
    """Outputs and inputs that are no multiples of a tile's or a run's, and rows of wider tensors, with rubbish beside them."""
    for (outputs, inputs), rows in itertools.product([(72, 1032), (333, 1152), (1000, 4096)], counts):
        torch.manual_seed(rows)
        weight, exact = packed_weight(outputs, inputs, 4, group, middles=middles, scales=scales, device="cuda")
        wide = torch.full((rows, inputs + 16), torch.nan, dtype=kind, device="cuda")
        x, right = wide[:, 8:-8], (exact.bfloat16() if tiling.rounded else exact).double().t().cuda()
        x.copy_(torch.randn(rows, inputs))
        bias = torch.randn(outputs, device="cuda").to(kind) if rows % 2 else None
        assert takes(x, weight, bias)
        got = linear(x, weight, bias, tiling)
        expected = x.double() @ right + (0 if bias is None else bias.double())
        assert close(got, expected, x.double().abs() @ right.abs())
        assert torch.equal(linear(x, weight, bias, tiling), got)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("kind", [BF16, HALF])
@pytest.mark.parametrize("tiling", [CASES[0][0], CASES[4][0]], ids=str)
def test_gated(tiling: CudaPackedTiling, kind: torch.dtype) -> None:
    weight, _ = packed_weight(768, 1032, 4, 128, device="cuda")
    for rows in (16, 40):
        x = torch.randn(rows, 1032, device="cuda").to(kind) / 16
        expected = silu_mul_ref(linear(x, weight, None, tiling))
        torch.testing.assert_close(linear(x, weight, None, tiling, gated=True), expected, rtol=2e-2, atol=1e-4)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize(("outputs", "inputs", "group", "kind"), [
    (5024, 4096, 128, BF16), (208, 1032, 256, HALF), (4240, 5120, 128, BF16), (48, 120, 128, BF16),
])  # fmt: skip
def test_gated_few_rows(outputs: int, inputs: int, group: int, kind: torch.dtype) -> None:
    """Blocks that go through several outputs, and some without any; rows of wider tensors, with rubbish beside them."""
    weight, exact = packed_weight(outputs, inputs, 4, group, device="cuda")
    for rows in (1, 5, 8):
        wide = torch.full((rows, inputs + 16), torch.nan, dtype=kind, device="cuda")
        x = wide[:, 8:-8]
        x.copy_(torch.randn(rows, inputs) / 16)
        expected = silu_mul_ref((x.double() @ exact.double().t().cuda()).to(kind))
        got = few_gated(x, weight)
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=1e-4)
        assert torch.equal(few_gated(x, weight), got)


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("rows", [8, 16, 32, 48, 64, 128, 256, 400])
def test_chosen(rows: int) -> None:
    for (outputs, inputs), gates in QWEN3_8B.items():
        weight, exact = packed_weight(outputs, inputs, 4, 128, scales=BF16, device="cuda")
        x = torch.randn(rows, inputs, device="cuda").bfloat16()
        tiling = choose(x, weight)
        right = (exact.bfloat16() if tiling is not None and tiling.rounded else exact).double().t().cuda()
        got = wna16_linear(x, weight)
        assert close(got, x.double() @ right, x.double().abs() @ right.abs())
        if gates:
            gated = wna16_gated(x, weight)
            assert gated is not None
            torch.testing.assert_close(gated, silu_mul_ref(got), rtol=2e-2, atol=1e-4 * float(got.abs().max()) ** 2)


@pytest.mark.gpu
@GPU
def test_captured() -> None:
    """Products behind each other, of which each begins before the one before is complete."""
    first, _ = packed_weight(6144, 4096, 4, 128, scales=BF16, device="cuda")
    second, _ = packed_weight(4096, 6144, 4, 128, scales=BF16, device="cuda")
    for tiling, rows in (CudaPackedTiling(16, 2, 4), 8), (CudaPackedTiling(64, 3, 2), 64):

        def products(x: torch.Tensor, tiling: CudaPackedTiling = tiling) -> torch.Tensor:
            return linear(linear(linear(x, first, None, tiling), second, None, tiling), first, None, tiling)

        check_captured(rows, 4096, products)
