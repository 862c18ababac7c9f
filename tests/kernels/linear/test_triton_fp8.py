"""Products in FP8 against their references and float64."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.linear.fp8 import EXACT_ROWS, fp8_linear
from headrace.kernels.linear.fp8_reference import GROUP, Fp8Weight, dequantize, quantize_rows_ref
from headrace.kernels.linear.fp8_tilings import FEW_ROWS, INVARIANT, FewTiling, SingleTiling, WideTiling
from headrace.kernels.linear.triton_fp8 import quantize_rows, scale
from headrace.kernels.linear.triton_fp8_few import few
from headrace.kernels.linear.triton_fp8_wide import wide

from .captured import check_captured

SHAPES = [(256, 128), (640, 256), (1280, 128)]
"""(in, out)"""


def weight_of(inputs: int, outputs: int, *, in_blocks: bool, device: torch.device, tall: int = GROUP) -> Fp8Weight:
    codes = (torch.randn(outputs, inputs) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
    shape = (-(-outputs // tall), inputs // GROUP) if in_blocks else (outputs, 1)
    return Fp8Weight(
        codes.to(device),
        (torch.rand(shape) * 1e-3 + 1e-4).to(device),
        torch.ones((), device=device),
        torch.zeros(outputs // 16, dtype=torch.int32, device=device),
    )


def rows_of(count: int, inputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(count, inputs) * torch.logspace(-2, 2, count)[:, None]
    x[:1, : inputs // 2] = -0.0
    return x.to(dtype)


def check(got: torch.Tensor, x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None, error: float = 2.0**-12) -> None:
    """Compares with float64. ``error``: of a sum, over the sum of its terms' sizes."""
    # On the CPU, since PyTorch's division by 448 is a product with its rounded inverse on a GPU.
    codes, scales = (each.to(x.device) for each in quantize_rows_ref(x.cpu(), weight.group))
    left = codes.double() * scales.double().repeat_interleave(weight.group, 1)
    right = dequantize(weight).double().t()
    expected = left @ right + (0 if bias is None else bias.double())
    step = 2.0**-8 if got.dtype == torch.bfloat16 else 0.0
    bound = error * (left.abs() @ right.abs()) + step * expected.abs() + 1e-6
    assert bool(((got.double() - expected).abs() <= bound).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("inputs", "group"), [(256, 128), (256, 256), (1280, 128), (1300, 1300)])
def test_rows_are_rounded_as_the_reference_rounds(inputs: int, group: int, dtype: torch.dtype, device: torch.device) -> None:
    wide = torch.full((3, inputs + 20), torch.nan, dtype=dtype)
    wide[:, 10:-10] = rows_of(3, inputs, dtype)
    rounded = quantize_rows(wide.to(device)[:, 10:-10], group)
    expected, factors = quantize_rows_ref(wide[:, 10:-10], group)
    # cuBLASLt's blocks are of multiples of four rows.
    assert len(rounded.codes) == len(rounded.scales) == 4
    assert (rounded.rows, rounded.dtype) == (3, dtype)
    assert torch.equal(rounded.scales[:3].cpu(), factors)
    assert torch.equal(rounded.codes[:3].cpu().view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("inputs", [8192, 12_290])
def test_long_rows_are_rounded_by_several_programs(inputs: int, device: torch.device) -> None:
    x = rows_of(1, inputs, torch.float16)
    expected, factors = quantize_rows_ref(x, inputs)
    rounded = quantize_rows(x.to(device), inputs)
    assert torch.equal(rounded.scales[:1].cpu(), factors)
    assert torch.equal(rounded.codes[:1].cpu().view(torch.uint8), expected.view(torch.uint8))


FEW = [FewTiling(16, 4, 4), FewTiling(32, 2, 2), FewTiling(8, 4, 8), SingleTiling(4, 256, 4, 2), SingleTiling(2, 1024, 4, 4)]


FEW_CASES = [(tiling, rows) for tiling in FEW for rows in ((1,) if isinstance(tiling, SingleTiling) else (1, 7, FEW_ROWS))]
QUICK = [(FEW[0], 1), (FEW[0], 7), (FEW[1], FEW_ROWS), (FEW[2], FEW_ROWS), (FEW[3], 1), (FEW[4], 1)]


@pytest.mark.parametrize(
    ("tiling", "rows"), [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in FEW_CASES], ids=str
)
@pytest.mark.parametrize("in_blocks", [False, True], ids=["outputs", "blocks"])
def test_few_rows(in_blocks: bool, tiling: FewTiling | SingleTiling, rows: int, device: torch.device) -> None:
    torch.manual_seed(rows)
    for number, (inputs, outputs) in enumerate([*SHAPES, (384 if in_blocks else 336, 208)]):
        weight = weight_of(inputs, outputs, in_blocks=in_blocks, device=device, tall=GROUP if number < 3 else 64)
        x = rows_of(rows, inputs).to(device)
        more = torch.randn(outputs, device=device) if number % 2 else None
        check(few(quantize_rows(x, weight.group), weight, more, torch.float32, tiling), x, weight, more)


WIDE = [WideTiling(64, 16, 4, 3), WideTiling(128, 32, 8, 3, 2), WideTiling(64, 32, 4, 3, 3)]
QUICK_WIDE = [(WIDE[0], 17), (WIDE[1], 3), (WIDE[1], 40), (WIDE[2], 17)]


@pytest.mark.parametrize(
    ("tiling", "rows"),
    [
        pytest.param(tiling, rows, marks=() if (tiling, rows) in QUICK_WIDE else pytest.mark.slow)
        for tiling in WIDE
        for rows in (3, 17, 40)
    ],
    ids=str,
)
@pytest.mark.parametrize("in_blocks", [False, True], ids=["outputs", "blocks"])
def test_many_rows(in_blocks: bool, tiling: WideTiling, rows: int, device: torch.device) -> None:
    torch.manual_seed(rows)
    for inputs, outputs in [*SHAPES[:2], (384 if in_blocks else 336, 208)]:
        tall = 64 if outputs % GROUP and tiling.outputs == 64 else GROUP
        weight = weight_of(inputs, outputs, in_blocks=in_blocks, device=device, tall=tall)
        x, bias = rows_of(rows, inputs).to(device), torch.randn(outputs, device=device)
        rounded = quantize_rows(x, weight.group)
        for more in (bias, None):
            check(wide(rounded, weight, more, torch.float32, tiling), x, weight, more)
        assert not weight.turns.any()


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scales_are_applied_at_the_end(dtype: torch.dtype, bias: bool, device: torch.device) -> None:
    raw, rows, columns = torch.randn(5, 2100) * 1e6, torch.rand(5, 1), torch.rand(2100, 1)
    more = torch.randn(2100) if bias else None
    on = [None if each is None else each.to(device) for each in (raw, rows, columns, more)]
    got = scale(*on, dtype).cpu()  # type: ignore[arg-type]
    expected = raw.double() * rows.double() * columns.double().t() + (0 if more is None else more.double())
    # The interpreter cuts off what bfloat16 has no bits for.
    bound = 2.0**-7 * expected.abs() if dtype == torch.bfloat16 else torch.zeros(())
    assert bool(((got.double() - expected).abs() <= bound + 2.0**-22 * raw.abs() + 1e-6).all())


def test_factors_that_do_not_fit_are_refused(device: torch.device) -> None:
    weight = weight_of(256, 128, in_blocks=True, device=device)
    for shape in ((2, 128), (FEW_ROWS + 1, 256)):
        with pytest.raises(ValueError, match="do not fit"):
            few(quantize_rows(rows_of(*shape).to(device), GROUP), weight, None, torch.float32, FEW[0])
    with pytest.raises(ValueError, match="one row"):
        few(quantize_rows(rows_of(2, 256).to(device), GROUP), weight, None, torch.float32, SingleTiling(4, 256, 4, 2))
    with pytest.raises(ValueError, match="do not fit"):
        wide(quantize_rows(rows_of(2, 128).to(device), GROUP), weight, None, torch.float32, WIDE[0])


@pytest.mark.parametrize("in_blocks", [False, True], ids=["outputs", "blocks"])
def test_a_row_is_bitwise_the_same_in_any_batch(in_blocks: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    shape = (4096, 6144) if device.type == "cuda" else (256, 128)
    weight = weight_of(*shape, in_blocks=in_blocks, device=device)
    x = rows_of(128, shape[0], torch.bfloat16).to(device)
    whole = wide(quantize_rows(x, weight.group), weight, None, torch.float32, INVARIANT)
    check(whole, x, weight, None)
    for first, last in ((0, 1), (77, 78), (127, 128), (3, 20), (60, 125)):
        alone = wide(quantize_rows(x[first:last], weight.group), weight, None, torch.float32, INVARIANT)
        assert torch.equal(alone, whole[first:last])


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 2, 8, 16, 17, 33, 64, 128, 200, 257, 600])
@pytest.mark.parametrize("in_blocks", [False, True], ids=["outputs", "blocks"])
@pytest.mark.parametrize("shape", [(512, 384), (128, 256), (4096, 6144), (1536, 2112)], ids=str)
def test_products_of_any_number_of_rows(shape: tuple[int, int], in_blocks: bool, rows: int, out_dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    device = torch.device("cuda")
    # As latent projections have them.
    weight = weight_of(*shape, in_blocks=in_blocks, device=device, tall=64 if shape[1] % GROUP else GROUP)
    x, bias = rows_of(rows, shape[0], torch.bfloat16).to(device), torch.randn(shape[1], device=device, dtype=torch.bfloat16)
    got = fp8_linear(quantize_rows(x, weight.group), weight, bias, out_dtype)
    assert got.shape == (rows, shape[1]) and got.dtype == out_dtype
    # Fast sums keep about 14 bits of their largest term, which is seen where a block is all there is.
    exact = in_blocks or rows <= EXACT_ROWS
    check(got, x, weight, bias, (2.0**-12 if shape[0] > GROUP else 2.0**-11) if exact else 2.0**-10)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 16, 33, 64, 200, 600])
@pytest.mark.parametrize("in_blocks", [False, True], ids=["outputs", "blocks"])
def test_captured_products_need_no_memory_but_their_own(in_blocks: bool, rows: int) -> None:
    """Whatever a library keeps for its next call, a graph must not have."""
    weight = weight_of(1024, 768, in_blocks=in_blocks, device=torch.device("cuda"))
    check_captured(rows, 1024, lambda x: fp8_linear(quantize_rows(x, weight.group), weight))
