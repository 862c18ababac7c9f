"""Products with packed integers against float64."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels import support
from headrace.kernels.activation.reference import silu_mul_ref
from headrace.kernels.linear import triton_wna16 as kernels
from headrace.kernels.linear.wna16 import wna16_linear
from headrace.kernels.linear.wna16_reference import PackedWeight
from headrace.kernels.linear.wna16_tilings import INVARIANT, PackedManyTiling, choose_few, choose_many

from .captured import check_captured
from .packed import packed_weight

CASES = [
    (4, 128, False, torch.float16),
    (4, 256, True, torch.bfloat16),
    (4, 32, True, torch.float16),
    (8, 128, True, torch.float32),
    (8, 64, False, torch.float16),
    (8, 32, False, torch.bfloat16),
    (4, 16, True, torch.float16),
]
"""Bits, the group, whether there are zero points, the dtype of scales."""
SHAPE = 72, 456
"""Outputs and inputs: no multiples of a tile, nor of a group."""
DTYPES = [torch.bfloat16, torch.float16]


def rows_of(count: int, inputs: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Rows that are not contiguous, between numbers that nothing may read."""
    wide = torch.full((count, inputs + 24), torch.nan, dtype=dtype)
    wide[:, 8:-16] = (torch.randn(count, inputs) * torch.logspace(-1, 1, count)[:, None]).to(dtype)
    return wide.to(device)[:, 8:-16]


def check(got: torch.Tensor, x: torch.Tensor, exact: torch.Tensor, bias: torch.Tensor | None, group: int) -> None:
    """Compares float32 results with float64: the error of a sum, over the sum of its terms' sizes. Weights of groups of 16 are
    rounded, by the interpreter downwards."""
    left, right = x.double().cpu(), exact.double().t()
    expected = left @ right + (0 if bias is None else bias.double().cpu())
    relative = 2.0**-15 if group > 16 else 2.0**-10 if x.dtype == torch.float16 else 2.0**-7
    assert bool(((got.double().cpu() - expected).abs() <= relative * (left.abs() @ right.abs()) + 1e-6).all())


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("rows", "dtype"), [(1, torch.bfloat16), (2, torch.float16), (8, torch.bfloat16)], ids=str)
def test_few(rows: int, dtype: torch.dtype, case: tuple[int, int, bool, torch.dtype], device: torch.device) -> None:
    torch.manual_seed(rows)
    bits, group, middles, scales = case
    weight, exact = packed_weight(*SHAPE, bits, group, middles=middles, scales=scales, device=device)
    x, bias = rows_of(rows, SHAPE[1], dtype, device), torch.randn(SHAPE[0], device=device) if rows > 1 else None
    check(kernels.few(x, weight, bias, torch.float32), x, exact, bias, group)


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[4]], ids=str)
@pytest.mark.parametrize("rows", [1, 5])
def test_gated(rows: int, case: tuple[int, int, bool, torch.dtype], device: torch.device) -> None:
    torch.manual_seed(rows)
    bits, group, middles, scales = case
    weight, _ = packed_weight(48, 456, bits, group, middles=middles, scales=scales, device=device)
    x = rows_of(rows, 456, torch.float16, device) / 16
    expected = silu_mul_ref(kernels.few(x, weight, None, torch.float16))
    torch.testing.assert_close(kernels.few(x, weight, None, torch.float16, gated=True), expected, rtol=2e-3, atol=1e-5)


def check_many(
    rows: int, case: tuple[int, int, bool, torch.dtype], tiling: PackedManyTiling | None, device: torch.device
) -> None:
    torch.manual_seed(rows)
    bits, group, middles, scales = case
    weight, exact = packed_weight(*SHAPE, bits, group, middles=middles, scales=scales, device=device)
    x, bias = rows_of(rows, SHAPE[1], torch.bfloat16, device), torch.randn(SHAPE[0], device=device) if rows > 2 else None
    first = kernels.many(x, weight, bias, torch.float32, tiling)
    check(first, x, exact, bias, group)
    assert not weight.arrived.any()
    assert torch.equal(kernels.many(x, weight, bias, torch.float32, tiling), first)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("rows", "tiling"), [(2, PackedManyTiling(16, 128, 8)), (17, PackedManyTiling(32, parts=2))], ids=str)
def test_many(rows: int, tiling: PackedManyTiling, case: tuple[int, int, bool, torch.dtype], device: torch.device) -> None:
    check_many(rows, case, tiling, device)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES, (8, 16, False, torch.float32)], ids=str)
@pytest.mark.parametrize("rows", [1, 16, 33, 64, 200])
def test_many_in_the_chosen_tiling(rows: int, case: tuple[int, int, bool, torch.dtype], device: torch.device) -> None:
    check_many(rows, case, None, device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_floats(case: tuple[int, int, bool, torch.dtype], dtype: torch.dtype, device: torch.device) -> None:
    bits, group, middles, scales = case
    weight, exact = packed_weight(*SHAPE, bits, group, middles=middles, scales=scales, device=device)
    got = kernels.floats(weight, dtype).cpu()
    if scales == torch.float32 or dtype == torch.bfloat16:
        # The interpreter cuts off what bfloat16 has no bits for.
        torch.testing.assert_close(got.float(), exact, rtol=2.0**-7, atol=1e-7)
    else:
        assert torch.equal(got, exact.to(dtype))


@pytest.mark.parametrize(
    "case", [CASES[1], *(pytest.param(case, marks=pytest.mark.slow) for case in (CASES[0], *CASES[2:]))], ids=str
)
def test_a_row_is_bitwise_the_same_in_any_batch(case: tuple[int, int, bool, torch.dtype], device: torch.device) -> None:
    bits, group, middles, scales = case
    weight, _ = packed_weight(72, 256, bits, group, middles=middles, scales=scales, device=device)
    x, tiling = rows_of(128, 256, torch.bfloat16, device), INVARIANT
    whole = kernels.many(x, weight, None, torch.bfloat16, tiling)
    for first, last in ((0, 1), (77, 78), (127, 128), (3, 20), (60, 125)):
        assert torch.equal(kernels.many(x[first:last], weight, None, torch.bfloat16, tiling), whole[first:last])


@pytest.mark.parametrize("rows", [1, 8, 17, 64, 200])
@pytest.mark.parametrize("size", [(4096, 4096), (24576, 4096), (4096, 12288), (6144, 4096)], ids=str)
def test_chosen_tilings_fit_the_kernels(size: tuple[int, int], rows: int) -> None:
    weight, _ = packed_weight(8, 128, 4, 128)
    large = weight._replace(
        words=weight.words.expand(1, size[1] // 128, 1, 8, 16), scales=weight.scales[:, :1].expand(1, size[0])
    )
    many = choose_many(rows, large)
    assert choose_few(large).outputs % 16 == 0
    for tiling in (many, INVARIANT):
        assert tiling.warps % 4 == 0 and tiling.outputs % (16 * tiling.warps) == 0
        tiles = -(-size[0] // tiling.outputs) * -(-rows // tiling.rows)
        assert tiling.parts == 1 or tiles <= len(weight.arrived)


def test_programs_that_do_not_fit_at_once_have_fewer_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "resources", lambda device: support.Resources(multiprocessors=132, shared_memory=0))
    words, arrived = torch.empty(1, 1, 1, 8, 16, device="meta"), torch.empty(0, device="meta")
    sizes = (6337, 4096), (6336, 4096), (6337, 4224)
    weights = [PackedWeight(words, torch.empty(1, out, device="meta"), None, 128, inputs, arrived) for out, inputs in sizes]
    assert [choose_few(weight).registers for weight in weights] == [128, None, None]


def test_weights_of_8_bits_have_fewer_registers_where_scales_take_none() -> None:
    words, arrived = torch.empty(1, 1, 2, 8, 16, device="meta"), torch.empty(0, device="meta")
    shapes = (1, 4096), (32, 4096), (1, 12288)
    weights = [PackedWeight(words, torch.empty(groups, 64, device="meta"), None, 0, k, arrived) for groups, k in shapes]
    assert [choose_few(weight).registers for weight in weights] == [128, None, None]


def test_factors_that_do_not_fit_are_refused(device: torch.device) -> None:
    weight, _ = packed_weight(72, 256, 4, 128, device=device)
    x = torch.zeros(9, 256, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="does not fit"):
        kernels.few(x, weight, None, torch.bfloat16)
    for wrong in (x[:, :128], x.float()):
        with pytest.raises(ValueError, match="does not fit"):
            kernels.many(wrong, weight, None, torch.bfloat16)
    crowded = weight._replace(arrived=weight.arrived[:1])
    with pytest.raises(ValueError, match="inputs of 2 tiles are split, of at most 1"):
        kernels.many(x, crowded, None, torch.bfloat16, PackedManyTiling(32, 64, 4, parts=2))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 64, 200, 600])
@pytest.mark.parametrize("case", [CASES[0], CASES[4]], ids=str)
def test_captured_products_need_no_memory_but_their_own(rows: int, case: tuple[int, int, bool, torch.dtype]) -> None:
    """Whatever a library keeps for its next call, a graph must not have."""
    bits, group, middles, scales = case
    weight, _ = packed_weight(512, 1024, bits, group, middles=middles, scales=scales, device="cuda")
    check_captured(rows, 1024, lambda x: wna16_linear(x, weight))
