"""Products in FP8 against their references and float64."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.linear.fp8 import EXACT_ROWS, fp8_linear
from headrace.kernels.linear.fp8_reference import GROUP, Fp8Weight, dequantize, quantize_rows_ref
from headrace.kernels.linear.triton_fp8 import MAX_ROWS, blocks, quantize_rows, scale

SHAPES = [(256, 128), (640, 256), (1280, 128)]
"""(in, out)"""


def weight_of(inputs: int, outputs: int, *, in_blocks: bool, device: torch.device) -> Fp8Weight:
    codes = (torch.randn(outputs, inputs) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
    shape = (outputs // GROUP, inputs // GROUP) if in_blocks else (outputs, 1)
    return Fp8Weight(codes.to(device), (torch.rand(shape) * 1e-3 + 1e-4).to(device), torch.ones((), device=device))


def rows_of(count: int, inputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(count, inputs) * torch.logspace(-2, 2, count)[:, None]
    x[:1, : inputs // 2] = 0
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


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("inputs", "group"), [(256, 128), (256, 256), (1300, 1300)])
def test_rows_are_rounded_as_the_reference_rounds(
    inputs: int, group: int, dtype: torch.dtype, multiple: int, device: torch.device
) -> None:
    wide = torch.full((3, inputs + 20), torch.nan, dtype=dtype)
    wide[:, 10:-10] = rows_of(3, inputs, dtype)
    x = wide.to(device)[:, 10:-10]
    codes, scales = quantize_rows(x, group, multiple)
    expected, factors = quantize_rows_ref(x.cpu(), group)
    assert len(codes) == len(scales) == (3 if multiple == 1 else 4)
    assert torch.equal(scales[:3].cpu(), factors)
    assert torch.equal(codes[:3].cpu().view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("rows", [1, 7, MAX_ROWS])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks(shape: tuple[int, int], rows: int, bias: bool, device: torch.device) -> None:
    torch.manual_seed(rows)
    weight, x = weight_of(*shape, in_blocks=True, device=device), rows_of(rows, shape[0]).to(device)
    more = torch.randn(shape[1], device=device) if bias else None
    check(blocks(*quantize_rows(x, GROUP), weight, more, torch.float32), x, weight, more)


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
    for shape in ((2, 128), (MAX_ROWS + 1, 256)):
        with pytest.raises(ValueError, match="do not fit"):
            blocks(*quantize_rows(rows_of(*shape).to(device), GROUP), weight, None, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 2, 8, 9, 17, 64, 257, 600])
@pytest.mark.parametrize("in_blocks", [False, True], ids=["outputs", "blocks"])
@pytest.mark.parametrize("shape", [(512, 384), (4096, 6144)], ids=str)
def test_products_of_any_number_of_rows(shape: tuple[int, int], in_blocks: bool, rows: int, out_dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    device = torch.device("cuda")
    weight = weight_of(*shape, in_blocks=in_blocks, device=device)
    x, bias = rows_of(rows, shape[0], torch.bfloat16).to(device), torch.randn(shape[1], device=device, dtype=torch.bfloat16)
    got = fp8_linear(x, weight, bias, out_dtype)
    assert got.shape == (rows, shape[1]) and got.dtype == out_dtype
    # Fast sums keep about 14 bits.
    check(got, x, weight, bias, 2.0**-12 if in_blocks or rows <= EXACT_ROWS else 2.0**-10)
