"""Gated activations against their references."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from headrace.kernels.activation import reference as ref
from headrace.kernels.activation import triton as activation
from headrace.kernels.linear.triton_fp8 import quantize_rows
from kernels.closeness import STEP, close

# The interpreter computes a sigmoid by numpy, whose exp says so when it overflows.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

PAIRS = {"silu": (activation.silu_mul, ref.silu_mul_ref), "gelu": (activation.gelu_tanh_mul, ref.gelu_tanh_mul)}
Function = Callable[[torch.Tensor], torch.Tensor]


@pytest.mark.parametrize("dtype", STEP, ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (3, 96), (2, 2600), (0, 64)], ids=str)
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_matches_the_ref(
    pair: tuple[Function, Function], shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(0)
    gate_up = (4 * torch.randn(shape)).to(dtype)
    got, expected = pair[0](gate_up.to(device)), pair[1](gate_up)
    assert got.dtype == dtype
    # The activation is rounded, and then the product.
    close(got, expected, steps=2)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_far_from_zero(pair: tuple[Function, Function], device: torch.device) -> None:
    """No overflow in between, and no digits lost where the result is tiny."""
    gate = torch.tensor([-1e4, -60.0, -8.0, -1e-3, 0.0, 1e-3, 8.0, 1e4])
    gate_up = torch.cat((gate, torch.ones(8))).unsqueeze(0)
    got = pair[0](gate_up.to(device)).cpu()
    expected = pair[1](gate_up.double())
    torch.testing.assert_close(got.double(), expected, atol=1e-12, rtol=1e-5)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_rows_of_a_wider_tensor(pair: tuple[Function, Function], device: torch.device) -> None:
    wide = torch.full((3, 30), torch.nan)
    wide[:, 4:24] = torch.randn(3, 20)
    torch.testing.assert_close(pair[0](wide.to(device)[:, 4:24]).cpu(), pair[1](wide[:, 4:24]))


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_more_axes(pair: tuple[Function, Function], device: torch.device) -> None:
    gate_up = torch.randn(2, 3, 20)
    torch.testing.assert_close(pair[0](gate_up.to(device)).cpu(), pair[1](gate_up))


@pytest.mark.parametrize("dtype", STEP, ids=str)
def test_sigmoid_gated(dtype: torch.dtype, device: torch.device) -> None:
    x, gate = (4 * torch.randn(3, 2600)).to(dtype).split((1300, 1300), dim=1)
    got = activation.sigmoid_gated(x.to(device), gate.to(device))
    close(got, ref.sigmoid_gated(x, gate), steps=2)


def test_odd_width(device: torch.device) -> None:
    with pytest.raises(ValueError, match="2n"):
        activation.silu_mul(torch.zeros(2, 5, device=device))


@pytest.mark.parametrize("group", [None, 128], ids=["row", "blocks"])
@pytest.mark.parametrize("gelu", [False, True], ids=["silu", "gelu"])
@pytest.mark.parametrize(("rows", "width"), [(1, 128), (3, 640), (140, 128), (0, 256), (2, 2816)])
def test_rounded_in_the_same_kernel(rows: int, width: int, gelu: bool, group: int | None, device: torch.device) -> None:
    """Codes and scales are those of the product that is rounded behind it, bit for bit."""
    torch.manual_seed(0)
    gate_up = (4 * torch.randn(rows, 2 * width + 16)).bfloat16().to(device)[:, 8:-8]
    got = activation.rounded_gated(gate_up, group or width, gelu=gelu)
    product = activation.gelu_tanh_mul(gate_up) if gelu else activation.silu_mul(gate_up)
    expected = quantize_rows(product, group or width)
    assert (got.rows, got.dtype) == (rows, gate_up.dtype)
    assert torch.equal(got.scales[:rows], expected.scales[:rows])
    assert torch.equal(got.codes[:rows].view(torch.uint8), expected.codes[:rows].view(torch.uint8))
