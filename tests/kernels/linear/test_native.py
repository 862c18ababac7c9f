"""Products of few rows with bfloat16 weights on CPUs, by the compiled kernel."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels import native as library
from headrace.kernels.linear import linear
from headrace.kernels.linear.native import few_rows

pytestmark = pytest.mark.skipif(library.load() is None, reason="there is no compiler")


@pytest.fixture(scope="module")
def factors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two rows of x, which do not lie side by side, a weight and a bias."""
    seeded = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*size, generator=seeded) for size in ((2, 3 * 96), (68, 96), (68,)))
    return x.bfloat16()[:, 96:192], weight.bfloat16(), bias.bfloat16()


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("biased", [False, True])
def test_products_are_rounded_once(
    factors: tuple[torch.Tensor, torch.Tensor, torch.Tensor], dtype: torch.dtype | None, biased: bool
) -> None:
    x, weight, bias = factors
    added = bias if biased else None
    assert few_rows(x, weight, added, dtype) is not None
    y = linear(x, weight, added, dtype, exact=dtype is not None)
    exact = x.double() @ weight.double().t() + (bias.double() if biased else 0)
    assert y.dtype == (dtype or torch.bfloat16)
    torch.testing.assert_close(y.double(), exact, rtol=2**-8 if dtype is None else 1e-5, atol=1e-4)
    assert torch.equal(torch.cat([linear(row[None], weight, added, dtype, exact=dtype is not None) for row in x]), y)
    assert torch.equal(linear(x, weight, added, torch.float32), linear(x, weight, added).float())


def test_other_products_are_left_to_the_library(factors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    x, weight, _ = factors
    assert few_rows(x.repeat(2, 1), weight, None, None) is None
    assert few_rows(x[:0], weight, None, None) is None
    assert few_rows(x.float(), weight.float(), None, None) is None
    assert few_rows(x[:, :80].contiguous(), weight[:, :80].contiguous(), None, None) is None
    assert few_rows(x, weight[:66], None, None) is None
    assert few_rows(x, weight.t().contiguous().t(), None, None) is None
    assert few_rows(x, weight, None, torch.float16) is None
