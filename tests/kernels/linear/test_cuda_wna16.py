"""Products with weights of 4 bits by the kernel in CUDA C++."""

from __future__ import annotations

import itertools

import pytest
import torch

from headrace.kernels import support
from headrace.kernels.activation.reference import silu_mul_ref
from headrace.kernels.cuda_launch import CudaKernel
from headrace.kernels.linear import cuda_wna16
from headrace.kernels.linear.cuda_wna16 import MAX_ROWS, CudaPackedTiling, choose, linear, takes
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
    for rows, tiling, kind, scales, middles, gated in [
        (24, CudaPackedTiling(4, 2, together=1), BF16, BF16, False, True),
        (16, CudaPackedTiling(2, 8), HALF, HALF, True, False),
        (64, CudaPackedTiling(3, 1), BF16, HALF, False, True),
    ]:
        kernel = cuda_wna16._kernel.__wrapped__(tiling, rows, 32, kind, scales, middles, gated)
        assert kernel.binary().startswith(b"\x7fELF")


def chosen(rows: int, outputs: int, inputs: int, *, gated: bool = False) -> CudaPackedTiling | None:
    return choose(torch.empty(rows, inputs, dtype=BF16), empty_weight(outputs, inputs), gated=gated)


@pytest.mark.usefixtures("on_hopper")
def test_chosen_tilings_fit() -> None:
    """Shared memory of a multiprocessor of Hopper: 228 KB, of which a block takes 1 KB more than it asks for."""
    found = 0
    sizes = [*QWEN3_8B, (64, 128), (100, 1000), (2048, 2048), (5120, 25600), (151936, 4096), (8192, 28672)]
    for (outputs, inputs), rows in itertools.product(sizes, range(1, MAX_ROWS + 1)):
        if (tiling := chosen(rows, outputs, inputs)) is not None:
            found += 1
            runs, wide = -(-inputs // 128), cuda_wna16.wide_rows(rows)
            assert tiling.parts <= min(8, runs) and wide >= rows and tiling.teams > 1
            for middles in (False, True):
                assert tiling.shared(wide, runs, middles) + 1024 <= 228 << 10
            blocks = -(-outputs // tiling.outputs) * tiling.parts
            assert blocks <= 132 * tiling.together
    assert found > 100


@pytest.mark.usefixtures("on_hopper")
def test_what_is_left_to_other_kernels() -> None:
    """Few rows, and products of which the kernel was slower; outputs that halve within a block where it gates."""
    taken = {rows: [chosen(rows, *size) is not None for size in QWEN3_8B] for rows in (8, 9, 16, 17, 32, 33, 64)}
    some = [True, True, True, False]
    assert taken == {
        8: [False] * 4, 9: [True] * 4, 16: [True] * 4, 17: some, 32: some, 33: [False, False, True, False],
        64: [False, False, True, False],
    }  # fmt: skip
    assert chosen(16, 24576, 4096, gated=True) == chosen(16, 24576, 4096)
    assert chosen(16, 24512, 4096) is not None and chosen(16, 24512, 4096, gated=True) is None


def test_which_products_it_takes(monkeypatch: pytest.MonkeyPatch, on_hopper: None) -> None:
    x, weight = torch.empty(65, 1024, dtype=BF16), empty_weight(512, 512)
    assert [takes(x[:rows, :512], weight) for rows in (0, 1, 64, 65)] == [False, True, True, False]
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
    launches: list[tuple[object, ...]] = []
    monkeypatch.setattr(CudaKernel, "launch", lambda self, *arguments: launches.append((self, *arguments)))
    weight, _ = packed_weight(200, 520, 4, 256, middles=True)
    x, bias, tiling = torch.ones(13, 1024, dtype=HALF)[:, :520], torch.ones(200, dtype=HALF), CudaPackedTiling(2, 3, 4, 4, 1)
    y = linear(x, weight, bias, tiling)
    gates = linear(x, weight._replace(middles=None), None, tiling, gated=True)
    assert (y.shape, gates.shape, y.dtype) == ((13, 200), (13, 100), HALF)
    (kernel, grid, *given), (gating, _, *others) = launches
    assert weight.middles is not None and grid == (3, 2, 1)
    pointers = [tensor.data_ptr() for tensor in (x, weight.words, weight.scales, weight.middles, bias, y)]
    assert given == [*pointers, 13, 200, 520, 1024, 256]
    assert others[3:5] == [0, 0] and others[5] == gates.data_ptr()
    assert isinstance(kernel, CudaKernel) and isinstance(gating, CudaKernel)
    shape = {"ROWS": 16, "TEAMS": 2, "PARTS": 3, "DEPTH": 4, "BUFFERS": 4, "TOGETHER": 1, "HALVES": 0}
    assert kernel._macros == shape | {"HALF": 1, "HALF_SCALES": 1, "MIDDLES": 1, "GATED": 0}
    assert gating._macros == shape | {"HALF": 1, "HALF_SCALES": 1, "MIDDLES": 0, "GATED": 1}


CASES = [
    (CudaPackedTiling(2, 3), BF16, BF16, 128, False, (1, 16)),
    (CudaPackedTiling(2, 8, together=3, halves=True), HALF, BF16, 128, False, (9,)),
    (CudaPackedTiling(3, 8, 8, 4, 1), HALF, HALF, 256, True, (17, 24)),
    (CudaPackedTiling(2, 2, 2, 4, 1, True), BF16, HALF, 128, True, (32,)),
    (CudaPackedTiling(3, 1, 8, 4, 1), BF16, BF16, 128, True, (33, 48)),
    (CudaPackedTiling(4, 1, 4, 2, 1), BF16, BF16, 128, False, (64,)),
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
        x, right = wide[:, 8:-8], exact.double().t().cuda()
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
@pytest.mark.parametrize("rows", [8, 16, 32, 48, 64])
def test_chosen(rows: int) -> None:
    for (outputs, inputs), gates in QWEN3_8B.items():
        weight, exact = packed_weight(outputs, inputs, 4, 128, scales=BF16, device="cuda")
        x, right = torch.randn(rows, inputs, device="cuda").bfloat16(), exact.double().t().cuda()
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
    tiling = CudaPackedTiling(2, 4)
    for rows in (8, 64):
        check_captured(
            rows, 4096, lambda x: linear(linear(linear(x, first, None, tiling), second, None, tiling), first, None, tiling)
        )
